"""Everything one run of `in_process.py` measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from benchmarks.harness.results import Results
from benchmarks.harness.steady import Calls, Cost


@dataclass
class InProcessResults(Results):
    """Faults as in any benchmark; besides them, what a step costs when there are none."""

    #: Bytes per second of a plain copy over a socket.
    bandwidth: float = 0.0
    #: Pairs of jobs by comparison, and system calls of a training thread by script.
    steady: dict[str, list[tuple[Cost, Cost]]] = field(default_factory=dict)
    calls: dict[str, Calls] = field(default_factory=dict)
    #: How often an agent of ours had to kill a worker that was not freed, in all faults.
    last_resorts: int = 0

    @classmethod
    def from_json(cls, text: str) -> InProcessResults:
        data = json.loads(text)
        plain = Results.from_json(text)
        return cls(
            about=plain.about,
            faults=plain.faults,
            bandwidth=data["bandwidth"],
            steady={
                name: [(Cost(**first), Cost(**second)) for first, second in pairs]
                for name, pairs in data["steady"].items()
            },
            calls={script: Calls(**each) for script, each in data["calls"].items()},
            last_resorts=data["last_resorts"],
        )
