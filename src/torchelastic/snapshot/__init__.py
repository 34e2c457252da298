"""Worker process: committed state kept in memory that the agent holds, and restored from there.

keeper           `restore` and `commit` of run + keep, from here to the other modules
writer           copies state into the agent's memory beside the training
search, load     finds a version's pieces wherever they are, and copies them into tensors
restore_plan     which version all ranks continue from, and who sends what to whom; pure
shards, reshard  sharded tensors, and pieces written by a world of another size
leave            stores the committed state before this worker's node leaves
layout, messages the memory's format, and what a worker and its agent say to each other
node/            the agent's side
"""
