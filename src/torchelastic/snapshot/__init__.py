"""Worker process: committed state kept in memory that the agent holds, and restored from there.

keeper           `restore` and `commit` of run + keep, from here to the other modules
writer           copies state into the agent's memory beside the training
search           the search for the freshest state, of run + keep and of `train`
pieces           finds what a rank needs of a version in the memories of the nodes
restore          how run + keep loads what was found: from memory, storage, or the script
state_tree       the state as a skeleton and tensors, flattened and loaded
shards           sharded tensors, and the piece of them that a rank writes
leave            brings the newest state to safety before this worker's node leaves
layout, messages the memory's format, and the messages between a worker and its agent
agent_client     asks the agent, over the worker's channel
own_checkpoints  `restore` in a script with its own checkpoints
node/            the agent's side
"""
