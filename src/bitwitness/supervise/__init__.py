"""Running a job under torchrun: start it, watch it, and after an incident start it again without the bad node.

Two roles. A *member* is the wrapper of one node: it starts one agent, watches it and stops it. The *leader* decides who
trains and what follows from how that ended. They talk through the files of a run (`runfiles.supervision`) and nothing else.
No torch here: the supervisor outlives what torch does to a process.
"""
