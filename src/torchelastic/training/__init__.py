"""Worker process: the training loop of `torchelastic.train`, which survives lost peers.

train         train and run_train, under their path of release 0.1, and steps as users write them
loop          enter a world, take steps, roll back, enter the next
outcome       the table from exceptions to actions
gate          where a world ends between two steps, found without asking at every step
inbox         orders from the agent that the training thread has not acted on yet
control       the thread that listens to the agent while the training thread is busy
session       the world this worker is in
recovery      the state from memory or storage, if the workers do not have all of it
stored_state  checkpoints, written by rank 0 or by the first replica together
coordinator   CoordinatorP2P, and the hooks of release 0.1
standalone    a process that is its own node, without an agent
state         State; versions, and which one a world goes on from
torch_state   TorchState; parts: what it is made of; compatibility: one form on all workers
step_guard    Guard: when a step is bad, and the response, pure; step_judge: measures each step
state_checks  copies and hashes of the state, compared between workers every few steps
undo          roll back the step in flight
fixed_steps   the loop over fixed micro-batches (`BatchPolicy.fixed`)
audit         micro-batches that other workers repeat, to compare the bits
fixed_sums    their gradients, added along one tree over all workers
sharded/      models that are sharded over the workers of a replica
group/        the process group of a world
"""
