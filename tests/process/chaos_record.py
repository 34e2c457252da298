"""The record that workers of `chaos_worker` keep of themselves: reading it, and judging by it.

Which steps count is found here without asking torchelastic. A generation that did a step again has
made what earlier ones did of it void: so of each step the latest generation counts in which a
worker has finished it, and what *all* its workers had written down that they use is what was used.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.chaos import laws
from torchelastic.data import checker
from torchelastic.data.verdict import Line as LedgerLine
from torchelastic.data.verdict import check

NO_LIMIT = 1 << 30
#: How far behind what all ranks have finished a generation may begin: the step before may not be
#: sealed yet, and of the one before that the copies of a lost node's own pieces.
MOST_REDONE = {"train": 0, "sharded": 0, "script": 2, "checkpoint": NO_LIMIT}
#: So many wrong things of a kind are named.
MOST_NAMED = 5


#: A job that is started anew counts its generations from 0 again; here they go on from this.
START = 1000


class Record:
    """All lines of all processes of one start of a job, read as they are written."""

    def __init__(self, directory: Path, start: int = 0) -> None:
        self.directory, self.start = directory, start
        self.lines: list[dict[str, Any]] = []
        self._read: Counter[str] = Counter()

    def look(self) -> list[dict[str, Any]]:
        for entry in sorted(os.scandir(self.directory), key=lambda entry: entry.name):
            if entry.stat().st_size > self._read[entry.path]:
                self._read_on(entry.path)
        return self.lines

    def _read_on(self, path: str) -> None:
        with open(path, "rb") as file:
            file.seek(self._read[path])
            whole, end, _ = file.read().rpartition(b"\n")
        self._read[path] += len(whole) + len(end)
        for text in whole.splitlines():
            line = json.loads(text)
            if "generation" in line:
                line["generation"] += START * self.start
            self.lines.append(line)

    def of(self, *events: str) -> list[dict[str, Any]]:
        return [line for line in self.look() if line["event"] in events]


@dataclass
class History:
    """The work done, by generation and step: one entry for each rank."""

    used: dict[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)
    done: dict[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)
    #: By item: who has been handed it.
    handed: set[tuple[int, ...]] = field(default_factory=set)
    ends: list[dict[str, Any]] = field(default_factory=list)
    #: By step, the generation that counts.
    settled: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]]) -> History:
        made = cls(defaultdict(list), defaultdict(list))
        for line in lines:
            match line["event"]:
                case "item":
                    made.handed.add(tuple(line["item"]))
                case "used" | "done" as event:
                    by_step = made.used if event == "used" else made.done
                    by_step[line["generation"], line["step"]].append(line)
                case "end":
                    made.ends.append(line)
        for generation, step in made.done:
            made.settled[step] = max(generation, made.settled.get(step, -1))
        return made

    def of_step(self, step: int) -> list[dict[str, Any]]:
        """The items that the ranks of the generation that counts have used."""
        return self.used[self.settled[step], step]

    def readers(self, step: int) -> list[dict[str, Any]]:
        """The same, without ranks that read the samples of another one."""
        return [line for line in self.of_step(step) if line.get("reader") != -1]

    def bits(self, step: int) -> set[tuple[int, str]]:
        """The parameters after a step: of each part of the model."""
        return {_bits(line, "hash") for line in self.done[self.settled[step], step]}


def _bits(line: dict[str, Any], name: str) -> tuple[int, str]:
    return line.get("part", 0), line[name]


def judge(lines: Iterable[dict[str, Any]], *, samples: int, mode: str) -> list[str]:
    """Everything that is wrong with a whole training, in words."""
    history = History.of(lines)
    checks = (
        _about_steps(history),
        _about_samples(history, samples),
        _about_items(history),
        _about_parameters(history),
        _about_worlds(history, MOST_REDONE[mode]),
        _about_ends(history, samples),
    )
    return [sentence for check in checks for sentence in _some(check)]


def _some(sentences: Iterator[str]) -> Iterator[str]:
    """The first few: one thing that is wrong often makes all later ones wrong."""
    for number, sentence in enumerate(sentences):
        if number == MOST_NAMED:
            yield "... and more of this kind"
            return
        yield sentence


def _about_steps(history: History) -> Iterator[str]:
    """All steps from 0 on, and all ranks of each."""
    if not history.settled:
        yield "no step was finished"
    for step in range(max(history.settled, default=-1) + 1):
        if step not in history.settled:
            yield f"nobody has finished step {step}, but later ones were"
            continue
        lines = history.of_step(step)
        ranks, size = sorted(line["rank"] for line in lines), lines[0]["size"] if lines else 0
        if ranks != list(range(size)):
            where = _where(history.settled[step], step)
            yield f"{where}: ranks {ranks} of {size} have used samples"


def _about_samples(history: History, samples: int) -> Iterator[str]:
    """In the order of steps, each `samples` uses are an epoch and have each sample once."""
    uses: dict[int, list[int]] = defaultdict(list)
    epoch = total = 0
    for step in sorted(history.settled):
        for line in history.readers(step):
            for sample, *_ in line["items"]:
                uses[sample].append(step)
                total += 1
        if total >= samples:
            yield from _about_epoch(epoch, uses, samples)
            uses.clear()
            epoch, total = epoch + 1, 0
    if total:
        yield f"epoch {epoch} has {total} of {samples} samples"
        yield from _about_epoch(epoch, uses, samples)


def _about_epoch(epoch: int, uses: dict[int, list[int]], samples: int) -> Iterator[str]:
    missing = [sample for sample in range(samples) if sample not in uses]
    if missing:
        yield f"epoch {epoch}: samples {missing} are missing"
    for sample, steps in sorted(uses.items()):
        if len(steps) > 1 or not 0 <= sample < samples:
            yield f"epoch {epoch}: sample {sample} was used in steps {steps}"


def _about_items(history: History) -> Iterator[str]:
    """Check that a step used items of the dataset, and each item that was handed out once."""
    uses: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for step, generation in sorted(history.settled.items()):
        for line in history.readers(step):
            for item in line["items"]:
                uses[tuple(item)].append(_where(generation, step, line["rank"]))
    for item, places in uses.items():
        if item not in history.handed:
            yield f"{places[0]} used sample {item[0]}, which its dataset has not handed out"
        if len(places) > 1:
            yield f"one item of sample {item[0]} was used in {', '.join(places)}"


def _about_parameters(history: History) -> Iterator[str]:
    """Equal to the bit on all ranks that have the same part of the model after each step; each step
    begins with what the last left."""
    for (generation, step), lines in sorted(history.done.items()):
        bits = {_bits(line, "hash") for line in lines}
        if len(bits) > len({part for part, _ in bits}):
            hashes = {line["rank"]: line["hash"] for line in lines}
            yield f"{_where(generation, step)}: parameters differ by rank: {hashes}"
    for step, generation in sorted(history.settled.items()):
        before = {_bits(line, "before") for line in history.of_step(step)}
        if step - 1 not in history.settled:
            continue
        left = history.bits(step - 1)
        known = {part for part, _ in left}  # of others all may have died before they said it
        if {one for one in before if one[0] in known} - left:
            last = _where(history.settled[step - 1], step - 1)
            yield f"{_where(generation, step)} does not begin with what {last} has left"


def _about_worlds(history: History, most_redone: int) -> Iterator[str]:
    """One after the other, and none begins further back than it must."""
    events: list[laws.Event] = []
    at = 0.0
    for generation in sorted({generation for generation, _ in history.used}):
        steps = [step for number, step in history.used if number == generation]
        done = [line for step in steps for line in history.done.get((generation, step), [])]
        at = min((line["at"] for line in done), default=at)
        used = history.used[generation, steps[0]]
        ranks = frozenset(map(str, range(used[0]["size"])))
        events.append(laws.WorldPublished(at, generation, "", ranks))
        events.append(laws.WorkersBegan(at, "0", generation, min(steps)))
        events += [
            laws.StepFinished(line["at"], str(line["rank"]), generation, line["step"])
            for line in done
        ]
    events.sort(key=lambda event: event.at)  # stable
    for violation in laws.check(events, laws.Rules(redone=most_redone)):
        yield str(violation)


def _about_ends(history: History, samples: int) -> Iterator[str]:
    """The parameters have counted as many uses of each sample as there were epochs."""
    if not history.ends:
        yield "nobody has come to the end"
    for line in history.ends:
        used = sum(
            len(used["items"])
            for step in history.settled
            if step < line["step"]
            for used in history.readers(step)
        )
        wrong = {
            sample: times
            for sample, times in enumerate(line["counts"])
            if times not in (None, used / samples)
        }
        if wrong:
            yield f"after {used / samples:g} epochs process {line['pid']} has counted {wrong}"


def proven(
    records: Sequence[Record], ledgers: Sequence[Path], *, samples: int, mode: str
) -> list[str]:
    """List the faults in the record, the ledger, and between the two, over all starts of a job."""
    lines = [line for record in records for line in record.look()]
    wrong = judge(lines, samples=samples, mode=mode)
    found = checker.read(ledgers)
    settled = History.of(lines)
    used = sum(len(one["items"]) for step in settled.settled for one in settled.readers(step))
    verdict = check(found.lines, expected=range(samples), epochs=used // samples, lost=found.lost)
    if not verdict.ok:
        wrong.append(f"by the ledger:\n{verdict}")
    return [*wrong, *compare(lines, found.lines)]


def compare(lines: Iterable[dict[str, Any]], ledger: Sequence[LedgerLine]) -> list[str]:
    """Where the ledger and the record have something else of the same step and rank.

    The ledger counts steps that are done, the record names the step itself.
    """
    history = History.of(lines)
    wrong = []
    for line in ledger:
        generation = line.generation + START * line.start
        found = [
            used["items"]
            for used in history.used.get((generation, line.step - 1), [])
            if used.get("reader", used["rank"]) == line.rank
        ]
        if [[sample for sample, *_ in items] for items in found] != [list(line.ids)]:
            wrong.append(f"{line} used {list(line.ids)} by the ledger, {found} by the record")
    return wrong[:MOST_NAMED]


def _where(generation: int, step: int, rank: int | None = None) -> str:
    who = "" if rank is None else f"rank {rank} in "
    return f"{who}step {step} of generation {generation}"
