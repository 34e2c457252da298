"""The rows of `state.py`: jobs whose workers time themselves, and what is read from their lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import bandwidth, carried
from benchmarks.harness.job import Job, JobFailed, Place
from benchmarks.harness.launchers import OURS
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.state_results import StateResults

BLOCKED, SHARDED, OVERHEAD, ONE_CORE = "blocked", "sharded", "overhead", "one-core"
CHECKPOINT, FIRST_CHECKPOINT = "checkpoint", "first checkpoint"
CHECKPOINT_ALONE = "checkpoint, nothing to hide behind"
RESTORE, PEER = "restore", "peer"
#: Names of what is timed.
SNAPSHOT, HIDDEN, BACK_TO_BACK, COPY = "snapshot", "hidden", "back to back", "copy"
VOTE_AND_COPY = "vote and copy"
IN_A_STEP = "in a step"
OWN_MEMORY, MEMCPY = "own memory", "memcpy"
MEMCPY_FRESH = "memcpy by a new worker"
FROM_PEER, CARRIED = "memory of a peer", "agent to agent"
SOCKET, SOCKET_FRESH = "plain socket", "plain socket to memory of which half is new"
OURS_SAVED, TORCH_SAVE = "torchelastic", "torch.save"
DCP_SAVED = (
    "DCP async",
    "DCP async, own stager",
    "DCP async, own stager, process",
    "DCP async, copied by a thread, process",
)
LOADED = ("torch.load", "torch.load(mmap=True)", "DCP", "checkpoint of torchelastic")

_TRAIN, _STORAGE = "state_train.py", "state_storage.py"
#: What is measured in workers that are restarted. An error of any other ends its job.
_RESTARTS = "--measure=restore"
_OURS_ONCE = replace(OURS, flags=("--max-restarts", "0"))
#: Seconds a job may take, and a node that joins.
PATIENCE, JOIN_PATIENCE = 1200.0, 120.0

#: What is told of a comparison of steps.
SETTINGS: Sequence[str] = ("copy", "step", "batch", "free")

Line = dict[str, Any]


def blocked(results: StateResults, size: str, repetitions: int) -> None:
    for line in _measured(_TRAIN, size, "--measure=blocked", f"--repetitions={repetitions}"):
        if line["event"] == COPY:
            results.take(BLOCKED, COPY, line)
        else:
            results.take(BLOCKED, line["event"], line, "commit", "wait")


def sharded(results: StateResults, size: str, repetitions: int) -> None:
    """FSDP2 over tensor parallelism, 2 x 2: on each rank, its share of the bytes."""
    counts = ("--measure=sharded", f"--repetitions={repetitions}")
    for line in _measured(_TRAIN, size, *counts, workers=4):
        if line["event"] in (COPY, VOTE_AND_COPY):
            results.take(SHARDED, line["event"], line)
        elif not line["kept"]:
            raise JobFailed("a snapshot of shards was not kept")
        else:
            results.take(SHARDED, SNAPSHOT, line, "commit", "wait")


def overhead(
    results: StateResults, row: str, size: str, repetitions: int, tens: int, cores: int = 0
) -> None:
    counts = (f"--repetitions={repetitions}", f"--tens={tens}", f"--cores={cores}")
    for line in _measured(_TRAIN, size, "--measure=overhead", *counts):
        match line["event"]:
            case "settings":
                known = results.settings.setdefault(row, {})
                known |= {key: line[key] for key in SETTINGS if key in line}
            case "in a step":
                results.take(row, IN_A_STEP, line, "commit", "wait", "sealed")
            case "pair":
                pairs = results.pairs.setdefault(f"{row}, {line['name']}", [])
                pairs.append((line["first"], line["second"]))


def checkpoints(results: StateResults, size: str, repetitions: int, where: Path | None) -> None:
    """Also of the ways to load one, which the row of restores is compared with."""
    for line in _measured(_STORAGE, size, f"--repetitions={repetitions}", where=where):
        if line["event"] == "save":
            row = CHECKPOINT if line["hidden"] else CHECKPOINT_ALONE
            row = FIRST_CHECKPOINT if line["first"] else row
            results.take(row, line["name"], line, "call", "stored")
        elif line["event"] == "load":
            results.take(RESTORE, line["name"], line)


def restores(results: StateResults, size: str, repetitions: int) -> None:
    for line in _measured(_TRAIN, size, _RESTARTS, f"--repetitions={repetitions}"):
        results.take(RESTORE, line["event"], line)


def peer(results: StateResults, size: str, repetitions: int) -> None:
    """One node stays, another one joins and is killed again and again."""
    arguments = (f"--size={size}", "--measure=peer", "--seconds=600")
    with Job(OURS, _TRAIN, arguments, workers=1, nodes="1:2") as job:
        job.start_node()
        _wait_for(job, "kept", 1, guest=0)
        for number in range(1, repetitions + 1):
            guest = job.start_node(place=Place(environment={"BENCHMARK_GUEST": "1"}))
            _wait_for(job, "kept", number, guest=1)
            guest.kill()
            # The one that stays keeps its state with each guest, and alone before and after.
            _wait_for(job, "kept", 2 * number + 1, guest=0)
        for line in _lines(job):
            if line["event"] == "restored" and line["guest"]:
                if not line["step"]:
                    raise JobFailed(f"a guest found no state\n{job.output()}")
                results.take(PEER, FROM_PEER, line, "opened")
    for _ in range(repetitions):
        results.add(PEER, CARRIED, Repetition(carried.seconds(results.bytes)))
        for name, new in ((SOCKET, 0.0), (SOCKET_FRESH, 0.5)):
            seconds = bandwidth.copy_seconds(results.bytes, new=new)
            results.add(PEER, name, Repetition(seconds))


def _wait_for(job: Job, event: str, count: int, *, guest: int) -> None:
    def seen() -> bool:
        found = [each for each in _lines(job) if each["event"] == event]
        return len([each for each in found if each["guest"] == guest]) >= count

    if not job.wait_for(seen, JOIN_PATIENCE):
        raise JobFailed(f"not {count} times '{event}' within {JOIN_PATIENCE:g} s\n{job.output()}")


def _measured(
    script: str, size: str, *arguments: str, where: Path | None = None, workers: int = 1
) -> list[Line]:
    """All that the workers of a job of one node have written down, at the end of the job."""
    given: Sequence[str] = (f"--size={size}", *arguments)
    launcher = OURS if _RESTARTS in arguments else _OURS_ONCE
    with Job(launcher, script, given, workers=workers, elastic=False, parent=where) as job:
        node = job.start_node()
        job.wait_for(lambda: node.process.poll() is not None, PATIENCE)
        if node.process.poll() != 0:
            raise JobFailed(f"{script} did not end well\n{job.output(40)}")
        return list(_lines(job))


def _lines(job: Job) -> Iterator[Line]:
    for path in sorted((job.directory / "logs").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            yield json.loads(line)
