"""Judging nodes that run no job: burn-in before one, a search after an alarm, slices beside one that runs.

Apart from the guard, because here nothing is trained: the work is chosen so that its right answer is the same on every healthy
device of a kind, and devices are judged by their answers alone. `items` says what is computed, `judging` who is wrong, both
pure; what computes needs torch, and what searches a set of nodes by a command of the user's (`groups`) needs nothing at all.
"""
