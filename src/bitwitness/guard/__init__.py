"""What runs inside the training process: the order of a step, the checks, and how the ranks agree on what was seen."""
