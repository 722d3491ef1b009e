"""From an incident to a node that is out of service: signals of the hardware, a decision, an act of the cluster.

The guard names a device and stops there. What follows touches machines that other people use, so it lives apart from the
training process, knows no tensor, and runs on a machine without torch: it reads the files of runs and what the hardware says
of itself, proposes, and acts only where it was told that it may.
"""
