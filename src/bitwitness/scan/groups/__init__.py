"""Finding the bad nodes of a set by testing groups of them.

It stands beside the scan and not in it because it needs nothing of bitwitness on the nodes: any command that ends with 0
or 1 is a test. Everything here but `running` and `state` is pure.
"""
