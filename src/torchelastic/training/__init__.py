"""Worker process: the training loop of `torchelastic.train`, which survives lost peers.

loop          train and run_train: enter a world, take steps, roll back, enter the next
outcome       which exception leads to what, as a table
steps         what a step is: a function, or a generator
world_entry   from an order to enter a world to a working process group
gate          where a world ends between two steps, found without asking at every step
inbox         orders from the agent that the training thread has not acted on yet
control       the thread that listens to the agent while the training thread is busy
session       the world this worker is in
coordinator   what a coordinator knows: the agent's channel, or a node of its own (standalone)
"""
