"""Worker process: the training loop of `torchelastic.train`, which survives lost peers.

loop          train and run_train: enter a world, take steps, roll back, enter the next
outcome       the table from exceptions to actions
steps         a step as the user writes it: a function, or a generator
world_entry   from an order to enter a world to a working process group
gate          where a world ends between two steps, found without asking at every step
inbox         orders from the agent that the training thread has not acted on yet
control       the thread that listens to the agent while the training thread is busy
session       the world this worker is in
coordinator   CoordinatorP2P, and the hooks of release 0.1
standalone    a process that is its own node, without an agent
state/        State and TorchState
undo/         roll back the step in flight
group/        the process group of a world
"""
