"""The report of `bits.py`."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness import bits_plans
from benchmarks.harness.bits_hashes import Outcome
from benchmarks.harness.bits_rows import pairs
from benchmarks.harness.report import about, interval, load, median_range, table, verdict
from benchmarks.harness.results import Results
from benchmarks.harness.summary import ratio_interval

COST, CPU, BYTES, SPEED = 1.05, 1.05, 1.5, 0.95


@dataclass
class BitsResults(Results):
    outcomes: list[Outcome] = field(default_factory=list)
    #: By model and workers: the hash that plain DDP ends with.
    controls: dict[str, dict[str, str]] = field(default_factory=dict)
    #: By row, what was measured.
    found: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def render(results: BitsResults) -> str:
    parts = [about(results), load(results)]
    if results.outcomes:
        parts += _hashes(results)
    for model, by in results.controls.items():
        shown = ", ".join(f"{workers} workers {found}" for workers, found in by.items())
        parts.append(f"Control, plain DDP, {model}: {shown}.")
    rows = [row for name, found in results.found.items() for row in ROWS[name](found)]
    if rows:
        parts.append(table(("measure", "fixed batch", "beside it", "wanted"), rows))
    return "\n\n".join(parts) + "\n"


def _hashes(results: BitsResults) -> list[str]:
    failed = [one for one in results.outcomes if one.note]
    rows = []
    every = [(model, mode) for model in bits_plans.MODELS for mode in ("train", "keep")]
    for model, mode in [*every, (bits_plans.SHARDED, "train")]:
        plans = {one.seed: bits_plans.plan(one.seed) for one in results.outcomes}
        own = [
            one
            for one in results.outcomes
            if (plans[one.seed].model, plans[one.seed].mode) == (model, mode)
        ]
        equal = [one for one in own if not one.note]
        hashes = sum(one.compared for one in own)
        rows.append((model, mode, str(len(own)), str(len(equal)), str(hashes)))
    kinds = Counter(
        line.partition(" s  ")[2].split()[0]
        for one in results.outcomes
        for line in one.story
        if " s  " in line
    )
    done = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())
    total = len(results.outcomes)
    said = verdict(f"all {total} as one worker", not failed)
    parts = [
        table(("model", "mode", "runs", "equal", "hashes compared"), rows),
        f"{total - len(failed)} of {total} runs; {said}. What happened: {done}.",
    ]
    parts += [f"- seed {one.seed}: {one.note}" for one in failed]
    return parts


def _cost(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for where, ways in found.items():
        for what, name, limit in (
            ("wall", "seconds of a step", COST),
            ("thread", "CPU of the training threads", CPU),
            ("process", "CPU of all threads", CPU),
        ):
            ratios = pairs(ways, "fixed", "ddp", what)
            bound = ratio_interval(ratios)
            met = True if bound.high <= limit else False if bound.low > limit else None
            beside = f"DDP {statistics.median(ways['ddp'][what]):.4f} s"
            again = f"A/A {interval(pairs(ways, 'again', 'ddp', what))}"
            late = f"nothing sent early {interval(pairs(ways, 'late', 'ddp', what))}"
            shown = f"{statistics.median(ways['fixed'][what]):.4f} s, {interval(ratios)}"
            beside = "; ".join([beside, again, late])
            rows.append((f"{where}: {name}", shown, beside, verdict(f"<= {limit} x", met)))
    return rows


def _bytes(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for where, sent in found.items():
        ratio = sent["fixed"] / sent["ddp"]
        shown = f"{sent['fixed'] / 1e6:.1f} MB, {ratio:.3f} x"
        said = verdict(f"<= {BYTES} x", ratio <= BYTES)
        rows.append((f"{where}: bytes sent", shown, f"DDP {sent['ddp'] / 1e6:.1f} MB", said))
    return rows


def _copies(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for where, one in found.items():
        shown = f"{one['peak'] - one['buffers']:.2f}, and {one['buffers']:.2f} of buffers"
        rows.append((f"{where}: copies of the gradients", shown, "", "2 + log2(M/W)"))
    return rows


def _inside(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for k, one in found.items():
        met = max(one["seconds"]) <= one["limit"]
        said = verdict(f"worst within {one['limit']:.2f} s", met)
        shown = median_range(one["seconds"], 2, " s")
        rows.append((f"killed after {k} of 4: kill to the end of the step", shown, "", said))
    return rows


def _speed(found: dict[str, Any]) -> list[tuple[str, ...]]:
    part = {one: found["ideal"] / statistics.fmean(found[one]) for one in ("speed", "equal")}
    said = verdict(f"at least {SPEED}", part["speed"] >= SPEED)
    beside = f"equal shares {part['equal']:.3f}"
    return [("one of four at half speed: part of the ideal", f"{part['speed']:.3f}", beside, said)]


ROWS = {"cost": _cost, "bytes": _bytes, "copies": _copies, "inside": _inside, "speed": _speed}
