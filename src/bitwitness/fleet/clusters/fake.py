"""A cluster that lives in memory or in one file: what users' tests and ours act upon, with the same rules as a real one.

With a file it outlives the process that acts upon it, so that a controller can be killed at any instant and the next one asks
the same cluster. It counts every call, and can be told to refuse, to be slow to show what was done, or to be unreachable.
"""
