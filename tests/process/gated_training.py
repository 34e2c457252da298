"""A training of `chaos_worker`s that a scheduler runs; a gate holds its steps (`chaos_driver`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.process.chaos_record import History, Record, proven
from tests.support import poll_for

T = TypeVar("T")

WORKER = Path(__file__).with_name("scheduled_worker.py")
SAMPLES = 96
#: Seconds for whatever is waited for: nodes import torch on a machine that does much else.
PATIENCE = 180.0
NO_GATE = 1 << 30


class GatedTraining:
    """The orders and the lines of its workers; a subclass knows the scheduler."""

    def __init__(self, directory: Path, mode: str, **keys: object) -> None:
        self.directory = directory
        self._orders = directory / "orders"
        self._orders.mkdir(parents=True)
        self.open(0)
        keys = {"samples": SAMPLES, **keys}
        #: The script and its arguments.
        self.command = [str(WORKER), mode, str(directory), *(f"{k}={v}" for k, v in keys.items())]

    # --- where the job is ------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """The record of every start."""
        starts = sorted(int(path.name) for path in (self.directory / "record").glob("*"))
        return [Record(self.directory / "record" / str(start), start) for start in starts]

    def lines(self, *events: str) -> list[dict[str, Any]]:
        return [line for record in self.records() for line in record.of(*events)]

    def open(self, gate: int) -> None:
        """Let the job go on, as far as to this step."""
        self.gate = gate
        part = self._orders / "gate.part"
        part.write_text(str(gate))
        part.rename(self._orders / "gate")

    def reach(self, step: int, size: int, after: int = -1) -> int:
        """Let a world of this size, newer than `after`, come to a step; return its generation."""
        self.open(step)

        def there() -> int:
            found = [
                line["generation"]
                for line in self.lines("gate")
                if line["step"] == step and line["size"] == size and line["generation"] > after
            ]
            newest = max(found, default=-1)
            return newest + 1 if found.count(newest) == size else 0

        return self.wait_for(there, f"a world of {size} at step {step}") - 1

    def resized(self, size: int, after: int) -> int:
        """Let the job train until a newer world of this size does; return its generation."""

        def there() -> int:
            found = [
                line["generation"]
                for line in self.lines("gate")
                if line["size"] == size and line["generation"] > after
            ]
            if not found:
                self.open(self.gate + 1)
            return max(found, default=-1) + 1

        return self.wait_for(there, f"a world of {size} after generation {after}") - 1

    def last_epoch(self) -> None:
        """Let the job come to the end of the epoch it is in."""
        epoch = max(line["epoch"] for line in self.lines("gate"))
        (self._orders / "epochs").write_text(str(epoch + 1))
        self.open(NO_GATE)

    # --- what is wrong ---------------------------------------------------------------------------

    def proven(self, mode: str = "checkpoint") -> list[str]:
        """Everything that is wrong with the samples and parameters of the whole training."""
        ledgers = sorted((self.directory / "ledger").glob("*"), key=lambda path: int(path.name))
        return proven(self.records(), ledgers, samples=SAMPLES, mode=mode)

    def redone(self) -> dict[int, int]:
        """By generation, how many finished steps it did again."""
        history = History.of(line for record in self.records() for line in record.look())
        found, furthest = {}, -1
        for generation in sorted({generation for generation, _ in history.used}):
            steps = [step for number, step in history.used if number == generation]
            found[generation] = max(0, furthest + 1 - min(steps))
            furthest = max([furthest, *(s for g, s in history.done if g == generation)])
        return found

    def wait_for(self, probe: Callable[[], T], what: str) -> T:
        try:
            return poll_for(probe, what=what, timeout=PATIENCE)
        except AssertionError as error:
            raise AssertionError(self.told(str(error))) from None

    def told(self, what: str) -> str:
        """The fault, and everything seen and said so far."""
        return "\n".join([what, *map(str, self.lines("gate")[-8:]), self.said()[-8000:]])

    def said(self) -> str:
        raise NotImplementedError
