"""Which files of tests take longest, so that they can be started first."""

from __future__ import annotations

SLOW = (
    "guard/test_faults.py",
    "cli/test_documentation.py",
    "supervise/test_local.py",
    "guard/test_checkpoints.py",
    "guard/test_fault_free.py",
    "guard/test_recovery.py",
    "guard/test_reaction.py",
    "guard/test_workloads.py",
    "faults/test_injected_jobs.py",
    "supervise/test_kills.py",
    "browser/test_console.py",
    "verdict/test_audit_exhaustive.py",
    "guard/test_placements.py",
    "scan/test_scan_command.py",
    "guard/test_failures.py",
    "faults/test_survey.py",
    "faults/test_runner.py",
    "guard/test_between.py",
    "guard/test_files.py",
    "guard/test_saves_interrupted.py",
    "cli/test_demo_ends.py",
    "faults/test_judged.py",
    "scan/test_communication.py",
    "scan/test_work.py",
    "scan/test_ripple.py",
    "supervise/test_cluster.py",
    "web/test_acting.py",
    "fleet/test_controller_kills.py",
    "guard/test_refusals.py",
    "guard/test_nonfinite.py",
    "faults/test_again.py",
    "faults/test_outcomes.py",
    "test_bench.py",
    "cli/test_demo.py",
    "fleet/slurm/test_real.py",
    "supervise/test_run_command.py",
)
"""Files that take longest, longest first: whichever worker is free takes the next file, and a long one that came last would keep
all others waiting. A file that is not here is only less well placed."""
