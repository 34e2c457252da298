"""The rows of `guard.py`: each yields its runs."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.harness.bits_hashes import SCRIPT, Lines, reference
from benchmarks.harness.job import Job
from benchmarks.harness.launchers import OURS

PATIENCE = 300.0
WORKERS, COUNT = 3, 8
MODELS = ("transformer", "lstm", "convolution")
#: How often gradients are wrong, the rate of audits, runs, and steps of each.
AUDITS = (("once", 1.0, 25, 20), ("on", 1.0, 25, 20), ("on", 0.01, 20, 250))
_NAMED = re.compile(
    r"OtherBitsError: rank (\d+) computes other gradients of micro-batch \d+ of step (\d+)"
)


def audit(quick: bool) -> Iterator[dict[str, Any]]:
    """One of three workers has wrong gradients: is it named, after how many steps, and are all
    states as without it?"""
    references = {model: reference(model, COUNT, steps=AUDITS[0][3]) for model in MODELS}
    for number in range(3 if quick else max(count for _, _, count, _ in AUDITS)):
        model = MODELS[number % len(MODELS)]
        for how, rate, count, steps in AUDITS:
            if number >= count:
                continue
            source = random.Random(f"{how} {rate} {number}")
            rank, first = source.randrange(WORKERS), source.randrange(1, 15)
            keys = {"model": model, "count": COUNT, "steps": steps, "audit": rate}
            keys |= {"wrong": f"{rank}:{first}:{how}"}
            yield {"what": f"{how}, rate {rate}"} | _one(keys, rank, references[model])


def _one(keys: dict[str, Any], rank: int, expected: list[str]) -> dict[str, Any]:
    began = time.monotonic()
    words = [f"{name}={value}" for name, value in keys.items()]
    launcher = replace(OURS, flags=("--max-restarts", "5"))
    with Job(launcher, SCRIPT, words, workers=WORKERS, elastic=False) as job:
        node, lines = job.start_node(), Lines(job.directory / "logs")
        try:
            code: object = node.process.wait(PATIENCE)
        except Exception:
            code = "none: it does not end"
        every, said = lines.read(), job.output(1000)
    named = {(int(who), int(step)) for who, step in _NAMED.findall(said)}
    begun = min((one["step"] for one in every if one["event"] == "wrong"), default=-1)
    differ = [
        one
        for one in every
        if one["event"] == "hash" and one["step"] < len(expected)
        if one["hash"] != expected[one["step"]]
    ]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "note": f"exit code {code}: {said[-1500:]}" if code else "",
        "named": sorted({who for who, _ in named}) == [rank],
        # Steps with wrong gradients, the one included in which they were found.
        "after": min((step for _, step in named), default=-1) - begun + 1,
        "differ": len(differ),
        "compared": sum(one["event"] == "hash" for one in every),
    }
