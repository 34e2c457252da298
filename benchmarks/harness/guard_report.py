"""The report of `guard.py`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness.guard_rows import AUDITS, COUNT, WORKERS
from benchmarks.harness.report import about, load, table, verdict
from benchmarks.harness.results import Results


@dataclass
class GuardResults(Results):
    #: By row, its runs.
    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


_AUDIT = (
    "one wrong worker of three",
    "runs",
    "named",
    "found in its step",
    "hashes that differ",
)


def render(results: GuardResults) -> str:
    parts = [about(results), load(results)]
    if audits := results.found.get("audit"):
        parts.append(table(_AUDIT, _audit(audits)))
    others = [
        row for name, found in results.found.items() if name != "audit" for row in _row(found)
    ]
    if others:
        parts.append(table(("measure", "found", "wanted"), others))
    return "\n\n".join(parts) + "\n"


def _row(found: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for what in dict.fromkeys(one["what"] for one in found):
        own = [one for one in found if one["what"] == what]
        met = [one["met"] for one in own]
        shown = own[0].get("found", f"{sum(met)} of {len(met)}")
        notes = [one["note"] for one in own if one["note"]]
        yield what, "; ".join([shown, *notes]), verdict(own[0]["wanted"], all(met))


def _audit(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = []
    for how, rate, _, _ in AUDITS:
        own = [one for one in found if one["what"] == f"{how}, rate {rate}"]
        if not own:
            continue
        named = [one for one in own if one["named"]]
        said = verdict("all", len(named) == len(own))
        mean = statistics.fmean(one["after"] for one in named) if named else 0.0
        after = f"{mean:.1f} on average, expected {_expected(rate):.1f}"
        differ = f"{sum(one['differ'] for one in own)} of {sum(one['compared'] for one in own)}"
        differ = differ if rate == 1 else "steps before are not undone"
        rows.append((f"{how}, audit={rate}", str(len(own)), f"{len(named)}; {said}", after, differ))
    return rows


def _expected(rate: float) -> float:
    """The mean number of steps until a worker is found that is wrong from one of them on. In a step
    its own micro-batches may be repeated, and it may repeat those of others: as many on average."""
    each = COUNT / WORKERS
    unseen = (1 - rate) ** each * (1 - rate / (WORKERS - 1)) ** (COUNT - each)
    return 1 / (1 - unseen)
