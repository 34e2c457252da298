"""Worker process: undo the step in flight, so that it can be taken again.

undo              the state at the beginning of a step, and the return to it
writes            notices writes to parameters and optimizer state, and copies beforehand if needed
gradients         gradients as they were at the beginning of a step
"""
