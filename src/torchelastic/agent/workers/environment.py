"""The environment of a worker: torchrun's contract, and `NODE_RANK`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torchelastic.config import Entry, LaunchConfig, parse_endpoint
from torchelastic.rendezvous.world import World, WorldNode


def node_env(environ: Mapping[str, str], config: LaunchConfig) -> dict[str, str]:
    """The variables of every worker of this node, in every world; also those of the zygote.

    The OpenMP variable acts when torch is imported, so it must be right before the first fork.
    """
    env = dict(environ)
    # A worker's children inherit its environment, so it gets the secret by a descriptor.
    env.pop("TORCHELASTIC_SECRET", None)
    if config.nproc_per_node > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # TCPStore looks up the name of every address. Without a DNS server each takes glibc 5 s, on the
    # way into every world; 1 s is enough for a name that is only logged.
    env.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(config.signals_to_handle)
    if config.shared_signals:
        env["TORCHELASTIC_SHARED_SIGNALS"] = ",".join(config.shared_signals)
    return env


def worker_env(
    base: Mapping[str, str], config: LaunchConfig, world: World, node: WorldNode, local_rank: int
) -> dict[str, str]:
    """The environment of one worker in one world, without its error file."""
    host, port = parse_endpoint(_store_shown(config, world, node))
    env = dict(base)
    env.update(
        RANK=str(node.first_rank + local_rank),
        LOCAL_RANK=str(local_rank),
        NODE_RANK=str(node.node_rank),
        GROUP_RANK=str(node.node_rank),
        ROLE_RANK=str(node.first_role_rank + local_rank),
        ROLE_NAME=node.role,
        LOCAL_WORLD_SIZE=str(node.nproc),
        WORLD_SIZE=str(world.size),
        GROUP_WORLD_SIZE=str(world.count),
        ROLE_WORLD_SIZE=str(world.role_size(node.role)),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        TORCHELASTIC_RESTART_COUNT=str(world.generation),
        TORCHELASTIC_MAX_RESTARTS=str(config.max_restarts),
        TORCHELASTIC_RUN_ID=config.run_id,
        TORCHELASTIC_START=world.start,
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if config.replica_size:
        env["TORCHELASTIC_REPLICA_SIZE"] = str(config.replica_size)
    if config.nodes_per_replica > 1:
        env["TORCHELASTIC_REPLICA_PLACE"] = str(node.node_rank % config.nodes_per_replica)
    if config.virtual_local_rank:
        env.update(_one_device(base, local_rank))
    return env


def _store_shown(config: LaunchConfig, world: World, node: WorldNode) -> str:
    """The store's address as the worker sees it.

    As with torchrun, workers of a single node see `--master-addr` and `--master-port`; the agent
    forwards connections from there. With several nodes they see the store's own address.
    """
    if config.rdzv_backend != "static" or config.max_nodes > 1 or world.host != node.node:
        return world.store
    return config.rdzv_endpoint.partition(",")[0]


def standby_env(
    base: Mapping[str, str], config: LaunchConfig, world: World, local_rank: int, place: int
) -> dict[str, str]:
    """The environment of a worker that starts beside a world, to enter a later one.

    Its ranks are those of a last node; `torchelastic.train` sets the real ones. `place` is that of
    the node in its replica.
    """
    nproc, role = config.nproc_per_node, config.role
    node = WorldNode(
        node="",
        name="",
        addr="",
        node_rank=world.count + place,
        nproc=nproc,
        role=role,
        first_rank=world.size,
        first_role_rank=world.role_size(role),
        local_ranks=tuple(range(nproc)),
    )
    beside = replace(
        world,
        generation=world.generation + 1,
        size=world.size + nproc,
        count=world.count + 1,
        roles={**world.roles, role: world.role_size(role) + nproc},
    )
    return worker_env(base, config, beside, node, local_rank)


def _one_device(base: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The variables that make a worker local rank 0 with one visible device."""
    visible = base.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else []
    device = devices[local_rank] if local_rank < len(devices) else str(local_rank)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}


def entry_for(entry: Entry, local_rank: int) -> Entry:
    """The entry with `${local_rank}` in its arguments replaced, as torchrun does."""
    args = tuple(arg.replace("${local_rank}", str(local_rank)) for arg in entry.args)
    return Entry(entry.kind, entry.target, args)
