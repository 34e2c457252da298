"""Worker process: the training loop of `torchelastic.train`, which survives lost peers.

train         train and run_train, under their path of release 0.1
loop          enter a world, take steps, roll back, enter the next
outcome       the table from exceptions to actions
steps         a step as the user writes it: a function, or a generator; its statistics
gate          where a world ends between two steps, found without asking at every step
inbox         orders from the agent that the training thread has not acted on yet
control       the thread that listens to the agent while the training thread is busy
session       the world this worker is in
stored_state  checkpoints, written by rank 0 or by the first replica together
coordinator   CoordinatorP2P, and the hooks of release 0.1
standalone    a process that is its own node, without an agent
sharded/      models that are sharded over the workers of a replica
state/        State and TorchState
undo/         roll back the step in flight
group/        the process group of a world
"""
