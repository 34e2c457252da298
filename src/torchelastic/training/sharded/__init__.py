"""Worker process: sharded models in `torchelastic.train`, replicas that come and go.

mesh              `torchelastic.mesh`: the device mesh of this worker's replica
between           the average of gradients between replicas, and FSDP2
sharding          the sharded parts of a `TorchState`, and the joint all-reduce of each step
part_snapshots    a single replica's snapshots in its agents' memory
rehearsal         the optimizer's step, rehearsed by a worker that waits for its first world
shard_tree        a state as a tree of this worker's shards
"""
