"""One file a check. What they have in common is `base.Check`; the guard's list says which run, and in which order."""
