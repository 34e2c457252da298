"""Worker process: APIs of torchelastic 0.1 that the rest of the package does not need.

collectives       small collectives for `State.sync`
data_utilities    a sampler that continues in the middle of an epoch, and an iterator over epochs
fault_injection   random self-kills of a process
rendezvous_parameters   a rendezvous with its keys in one text
"""
