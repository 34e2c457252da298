"""The sharded workload in the state / train_step form: replicas are lost and come back."""

import argparse
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import sharded_workload
import torch
import torch.distributed as dist
from sizes import SHARDS
from workload import StepLog

import torchelastic
from torchelastic import torch_private
from torchelastic.p2p import CoordinatorP2P
from torchelastic.training import session

#: Of each kind one after the other, as often in turn.
JOINTS, TURNS = 50, 160


def main() -> None:
    parser = sharded_workload.parser(__doc__)
    parser.add_argument("--joint", default="", help="HOST:PORT: compare the joint all-reduce there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + arguments.seconds
    log = StepLog(arguments.record)
    mesh = torchelastic.mesh({"shard": SHARDS})
    model, optimizer = sharded_workload.build(arguments, mesh)
    state = torchelastic.TorchState(model=model, optimizer=optimizer)

    def train_step(state: torchelastic.TorchState) -> None:
        began = time.monotonic()
        if began > until or (arguments.steps and state.step >= arguments.steps):
            raise StopIteration
        sharded_workload.take_step(model, optimizer, arguments.size)
        world = session.current()
        log.in_world(world.generation, world.rank, world.size, world.generation)
        log.step(state.step + 1, began, collectives=world.group.launched)
        if arguments.joint and state.step + 1 == arguments.steps:
            compare_joint(arguments, state, log)

    log.write("built")
    torchelastic.train(CoordinatorP2P(), train_step, state)


def compare_joint(
    arguments: argparse.Namespace, state: torchelastic.TorchState, log: StepLog
) -> None:
    """Time the all-reduce that joins all workers, and that of a plain gloo group, in turn."""
    world = session.current()
    host, _, port = arguments.joint.partition(":")
    limit = timedelta(seconds=60)
    store = dist.TCPStore(host, int(port), world.size, world.rank == 0, limit)
    plain: Any = torch_private.Gloo(store, world.rank, world.size, timeout=limit)
    flag, sharding = torch.zeros(1, dtype=torch.int32), state._sharding
    assert sharding is not None

    def bare() -> None:
        plain.allreduce([flag], dist.AllreduceOptions()).wait()

    def joint() -> None:
        sharding._join_all(None)

    kinds: dict[str, Callable[[], None]] = {"joint": joint, "bare": bare}
    for call in kinds.values():
        each(call)
    for turn in range(TURNS):
        names = ("joint", "bare") if turn % 2 else ("bare", "joint")
        took = {name: each(kinds[name]) for name in names}
        log.write("joint", **took)


def each(call: Callable[[], None]) -> float:
    """Seconds that one takes of many in a row."""
    began = time.perf_counter()
    for _ in range(JOINTS):
        call()
    return (time.perf_counter() - began) / JOINTS


if __name__ == "__main__":
    main()
