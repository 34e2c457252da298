"""Worker process: the parts of a training state, as trees of tensors and as bytes.

tensor_tree      the allowed content of a state, as JSON and tensors, without pickle
tensor_bytes     the elements of tensors as bytes, and copies made while training continues
agreement        collectives of values: votes, numbers, JSON
transfer         sends state to the ranks that lack it
module_state     shared state, the same on every rank
rank_private     state that each rank has for itself; rng: random states
small_state      parts that are copied before every step; buffers: those of modules
"""
