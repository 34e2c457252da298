"""Everything one run measured, as data that can be saved and read again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.harness.cold_start import Pair
from benchmarks.harness.footprint import Footprint
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.summary import Summary, summarize


@dataclass
class Results:
    """Repetitions by row and launcher, pairs of cold starts by comparison, footprints."""

    about: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, dict[str, list[Repetition]]] = field(default_factory=dict)
    cold: dict[str, list[Pair]] = field(default_factory=dict)
    idle: dict[str, Footprint] = field(default_factory=dict)

    def add(self, row: str, launcher: str, repetition: Repetition) -> None:
        self.faults.setdefault(row, {}).setdefault(launcher, []).append(repetition)

    def repetitions(self, row: str, launcher: str) -> list[Repetition]:
        return self.faults.get(row, {}).get(launcher, [])

    def summary(self, row: str, launcher: str) -> Summary:
        return summarize([each.seconds for each in self.repetitions(row, launcher)])

    def to_json(self) -> str:
        data = asdict(self)
        for launchers in data["faults"].values():
            for repetitions in launchers.values():
                for repetition in repetitions:
                    del repetition["output"]  # long, and full of this machine's paths
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        data = json.loads(text)
        return cls(
            about=data["about"],
            faults={
                row: {name: [Repetition(**each) for each in many] for name, many in by.items()}
                for row, by in data["faults"].items()
            },
            cold={
                name: [(first, second) for first, second in pairs]
                for name, pairs in data["cold"].items()
            },
            idle={name: Footprint(**each) for name, each in data["idle"].items()},
        )


def about_this_run() -> dict[str, Any]:
    """The day, the commit and the machine."""
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "changed": bool(_git("status", "--porcelain", "--", ":/src", ":/benchmarks")),
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load_before": os.getloadavg()[0],
    }


def _git(*arguments: str) -> str:
    """What git says about this checkout; empty outside of one."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
