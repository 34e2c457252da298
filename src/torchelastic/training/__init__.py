"""What runs inside a resident worker: the loop, its state, its process group.

loop          train and run_train: enter a world, take steps, roll back, enter the next
outcome       which exception leads to what, as a table
steps         what a step is: a function, or a generator
world_entry   from an order to enter a world to a process group that stands
gate          where a world ends between two steps, found without asking at every step
inbox         what the agent has said and the training thread has not acted on yet
control       the thread that hears the agent while the training thread is busy
session       the world this worker is in
state         State, and how states written for release 0.1 are made to fit
coordinator   what a coordinator knows: the agent's channel, or a node of its own
group         the process group that can be aborted
"""
