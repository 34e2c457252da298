"""Who keeps the workload of `sharded.py` training, in which settings, and how it starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.harness import processes
from benchmarks.harness.contestants import (
    BY_HAND,
    OURS_IN_PROCESS,
    TORCHFT_LIMITS,
    TORCHFT_NOTE,
    TORCHRUN_TUNED,
    Contestant,
    peer_home,
    start_lighthouse,
)
from benchmarks.harness.job import Job, free_port
from benchmarks.harness.launchers import Launcher
from benchmarks.sizes import SHARDS

OURS_SCRIPT, NATIVE_SCRIPT = "sharded_train.py", "native_hsdp_train.py"
#: Seconds of sleep in a step, in place of compute.
COMPUTE = 0.05


@dataclass(frozen=True)
class ShardedContestant(Contestant):
    """A way to keep replicas of several workers training."""

    #: Ends the other workers of a replica when one was killed, where nobody else does.
    end_replica: Callable[[Job, int], None] = lambda job, pid: None


def _start_torchft(*flags: str) -> Callable[[Job], None]:
    """One lighthouse, and SHARDS processes per replica group."""

    def start(job: Job) -> None:
        start_lighthouse(job, *flags)
        for replica in range(2):
            _start_group(job, replica)

    return start


def _start_group(job: Job, replica: int) -> None:
    where = {
        "REPLICA_GROUP_ID": str(replica),
        "TORCHFT_LIGHTHOUSE": f"http://{job.endpoint}",
        "MASTER_PORT": str(free_port()),
    }
    for rank in range(SHARDS):
        job.start([sys.executable, *job.script], {**BY_HAND, **where, "RANK": str(rank)})


def _end_group(job: Job, pid: int) -> None:
    """The first process of a job is the lighthouse; the groups follow, one after the other."""
    workers = [node.process.pid for node in job.nodes[1:]]
    first = workers.index(pid) // SHARDS * SHARDS
    processes.kill(workers[first : first + SHARDS])


def _replace_group(job: Job, pid: int) -> None:
    """torchft starts no process: a lost group is started anew, under a name of its own."""
    _start_group(job, len(job.nodes))


def _torchft(title: str, note: str, *flags: str, gloo: float) -> ShardedContestant:
    return ShardedContestant(
        Launcher(
            f"torchft nightly HSDP, {title}",
            (),
            environment=peer_home("torchft-nightly"),
            start_patience=90.0,
            patience=30.0,
        ),
        f"`fully_shard` in a group, its all-reduce hook calls `Manager.allreduce`; {note}; gloo "
        f"time-out {gloo:g} s; the rest of a group is killed with its rank, and the group started "
        "anew when the other has gone on",
        "peers/torchft_hsdp_train.py",
        _start_torchft(*flags),
        replace_worker=_replace_group,
        collective_timeout=gloo,
        end_replica=_end_group,
    )


OURS_SHARDED = ShardedContestant(
    OURS_IN_PROCESS.launcher,
    "`torchelastic run --nproc-per-node` 4 (8), no other flags, no checkpoint",
    OURS_SCRIPT,
    OURS_IN_PROCESS.begin,
)
TORCHRUN_HSDP = ShardedContestant(
    replace(TORCHRUN_TUNED.launcher, start_patience=90.0),
    "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, `--monitor-interval 0.1`, `last_call_timeout=1`; "
    "`fully_shard` on a mesh of two dimensions, a DCP checkpoint to memory every 10 steps",
    NATIVE_SCRIPT,
    TORCHRUN_TUNED.begin,
)
TORCHFT_HSDP = (
    _torchft("heartbeat 1 s", f"lighthouse: {TORCHFT_NOTE}", *TORCHFT_LIMITS, gloo=1.0),
    _torchft("as shipped", "lighthouse as shipped (heartbeat time-out 5 s)", gloo=5.0),
)
PEERS: tuple[ShardedContestant, ...] = (TORCHRUN_HSDP, *TORCHFT_HSDP)
