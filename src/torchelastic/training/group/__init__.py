"""Worker process: the process group of a world, with waits that an abort can end.

group             the default process group of a world: entered, aborted, left
replica           the process groups of a sharded model, which outlive worlds
gloo              a process group whose operations gloo performs
abortable_waits   the waits of the training thread, which an abort ends
native_groups     groups that torch makes itself: NCCL and other backends
ddp               DistributedDataParallel across worlds
backward          hooks into backward passes
sockets           finds the sockets of a group, to shut them down
parked            groups that were left, until gloo is done with them
"""
