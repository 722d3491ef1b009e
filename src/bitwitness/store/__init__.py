"""Runs, incidents and the fleet's audit log in a database, so that a thousand runs can be looked at as one (DESIGN section 2).

The files of the runs stay the truth: everything here can be thrown away and imported anew. No torch.
"""
