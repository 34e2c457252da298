"""Worker process: committed state kept in memory that the agent holds, and restored from there.

keeper           `restore` and `commit` of run + keep, from here to the other modules
writer           copies state into the agent's memory beside the training
search           finds a version's pieces, on this node or another
fill_tensors     copies pieces into tensors
restore_plan     chooses the version that all ranks resume from; pure
shards, reshard  sharded tensors, and pieces written by a world of another size
leave            stores the committed state before this worker's node leaves
layout, messages the memory's format, and the messages between a worker and its agent
node/            the agent's side
"""
