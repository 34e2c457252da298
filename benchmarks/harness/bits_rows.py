"""The rows of `bits.py` that are timed."""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.harness.bits_hashes import SCRIPT, Lines
from benchmarks.harness.job import Job, JobFailed
from benchmarks.harness.launchers import OURS

COST = "bits_cost_train.py"
PATIENCE = 400.0
#: Seconds of a micro-batch in `inside` and in `speed`.
INSIDE, SPEED = 0.5, 0.1
#: Workers that are slower, by so much.
SLOWNESS = 2.0


def _lines(workers: int, script: str, **keys: object) -> list[dict[str, Any]]:
    """What the workers of an undisturbed job wrote."""
    words = [f"{name}={value}" for name, value in keys.items()]
    with Job(OURS, script, words, workers=workers, elastic=False) as job:
        node, lines = job.start_node(), Lines(job.directory / "logs")
        if node.process.wait(PATIENCE):
            raise JobFailed(job.output(40))
        return lines.read()


def cost(quick: bool) -> dict[str, Any]:
    """By workers and micro-batches: each way's seconds of all steps, of the slowest rank, and CPU
    seconds, summed over the ranks."""
    found = {}
    for workers, count, steps in ((4, 16, 25), (4, 8, 30), (2, 8, 20)):
        lines = _lines(
            workers, COST, ways="fixed,ddp,again,late", count=count, steps=5 if quick else steps
        )
        ways: dict[str, dict[str, list[float]]] = {}
        for way in ("fixed", "ddp", "again", "late"):
            own = [line for line in lines if line.get("way") == way]
            numbers = sorted({line["number"] for line in own})
            by = {one: [line for line in own if line["number"] == one] for one in numbers}
            ways[way] = {
                "wall": [max(line["wall"] for line in by[one]) for one in numbers],
                "thread": [sum(line["thread"] for line in by[one]) for one in numbers],
                "process": [sum(line["process"] for line in by[one]) for one in numbers],
            }
        found[f"{workers} workers, {count} micro-batches"] = ways
    return found


def bytes(quick: bool) -> dict[str, Any]:
    """By workers and micro-batches: how many times DDP's bytes a step sends."""
    found = {}
    cases = [(workers, 16) for workers in range(2, 7)] + [(3, 12), (6, 12), (4, 8)]
    for workers, count in cases[:2] if quick else cases:
        lines = _lines(
            workers, COST, ways="fixed,ddp", count=count, steps=5, wait=0.0, width=512, depth=8
        )
        sent = {
            way: statistics.median(one["sent"] for one in lines if one.get("way") == way)
            for way in ("fixed", "ddp")
        }
        found[f"{workers} workers, {count} micro-batches"] = sent
    return found


def copies(quick: bool) -> dict[str, Any]:
    """By workers: the memory that a step needs at its peak, in copies of the gradients."""
    found = {}
    for workers in (4,) if quick else (1, 2, 4):
        for way in ("fixed", "ddp"):
            lines = _lines(workers, COST, ways=way, count=16, steps=3, wait=0.0)
            peak = max(line["peak"] for line in lines if line["event"] == "cost")
            buffers = max(line["buffers"] for line in lines if line["event"] == "cost")
            found[f"{workers}, {way}"] = {"peak": peak, "buffers": buffers}
    return found


def inside(quick: bool) -> dict[str, Any]:
    """By k: seconds from the kill of a worker that has run k of its 4 micro-batches to the end of
    the step, and those that it may take."""
    found: dict[str, Any] = {}
    for k in range(4):
        seconds = [_kill_after(k, number) for number in range(1 if quick else 2)]
        limit = math.ceil((3 * (4 - k) + 4) / 3) * INSIDE + 0.15
        found[str(k)] = {"seconds": seconds, "limit": limit}
    return found


def _kill_after(k: int, number: int) -> float:
    """Kill a worker at the moment when it begins its next micro-batch."""
    step, victim = 2, number % 4
    words = [f"wait={INSIDE}", "count=16", "steps=3", "samples=64", "shares=equal", "bucket=6000"]
    with Job(OURS, SCRIPT, words, workers=4, elastic=False) as job:
        job.start_node()
        lines = Lines(job.directory / "logs")
        deadline = time.monotonic() + PATIENCE
        killed = 0.0
        while time.monotonic() < deadline:
            written = lines.read()
            begun = [one for one in written if one["event"] == "hash" and one["step"] == step]
            if not killed and len(begun) == 4:
                (target,) = (one for one in begun if one["rank"] == victim)
                ran = [
                    one
                    for one in written
                    if one["event"] == "ran"
                    and one["pid"] == target["pid"]
                    and one["t"] > target["t"]
                ]
                if len(ran) == k:
                    killed = time.monotonic()
                    os.kill(target["pid"], signal.SIGKILL)
            ended = [one for one in written if one["event"] == "step" and one["step"] == step + 1]
            survivors = [one for one in ended if one["t"] > killed > 0]
            if len(survivors) >= 3:
                return (
                    max(one["t"] for one in sorted(survivors, key=lambda one: one["t"])[:3])
                    - killed
                )
            time.sleep(0.002)
        raise JobFailed(job.output())


def speed(quick: bool) -> dict[str, Any]:
    """By shares: the steps' seconds when one of four workers has half the speed of the others, and
    those of the ideal, 3.5 workers."""
    found: dict[str, Any] = {}
    for shares in ("speed", "equal"):
        lines = _lines(
            4,
            SCRIPT,
            model="sparse",
            wait=SPEED,
            slow=1,
            slowness=SLOWNESS,
            count=28,
            measure=4,
            steps=14 if quick else 24,
            samples=2800,
            shares=shares,
        )
        steps = [one for one in lines if one["event"] == "step" and one["rank"] == 0]
        ends = [one["t"] for one in sorted(steps, key=lambda one: one["step"])]
        took = [after - before for before, after in pairwise(ends[8:])]
        found[shares] = took
    found["ideal"] = 28 * SPEED / 3.5
    return found


def pairs(ways: dict[str, dict[str, list[float]]], first: str, second: str, what: str) -> list[Any]:
    return list(zip(ways[first][what], ways[second][what], strict=True))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
