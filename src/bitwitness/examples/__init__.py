"""Real training jobs, as users write them. The demo, the tests and the benchmarks run these and no toys of their own."""
