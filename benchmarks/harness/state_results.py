"""Everything one run of `state.py` measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.results import Results
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.summary import Summary


@dataclass
class StateResults(Results):
    """Times by row and by what was timed; steps with and without snapshots as pairs."""

    pairs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    #: Bytes of parameters and optimizer state.
    bytes: int = 0
    #: Of rows that compare steps: seconds of a copy and of a step, the batch, and how many cores
    #: were free beside the training.
    settings: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Rows whose job did not end well: nothing of it is counted.
    failed_rows: list[str] = field(default_factory=list)

    def take(self, row: str, who: str, line: Mapping[str, Any], *details: str) -> None:
        """A measurement as a worker has written it down."""
        self.add(row, who, Repetition(line["seconds"], details={key: line[key] for key in details}))

    def details(self, row: str, who: str, name: str) -> Summary:
        return Summary(tuple(each.details[name] for each in self.repetitions(row, who)))

    @classmethod
    def from_json(cls, text: str) -> StateResults:
        data = json.loads(text)
        plain = Results.from_json(text)
        return cls(
            about=plain.about,
            faults=plain.faults,
            pairs={
                name: [(first, second) for first, second in pairs]
                for name, pairs in data["pairs"].items()
            },
            bytes=data["bytes"],
            settings=data["settings"],
            failed_rows=data["failed_rows"],
        )
