"""Any process: Linux calls, shared memory, memory limits, cgroups, and dying with an owner.

linux             Linux calls that Python lacks, and the tree of processes below this one
shared_memory     memory that processes share by its descriptor
memory_limit      how much memory snapshots may use
cgroup            a cgroup for the workers of an agent
devices           counts the devices of this machine without torch
die_with_owner    starts a program that ends with its owner
"""
