"""Hang diagnosis: which ranks are missing from the collective that the others wait in. Pure.

A worker in `torchelastic.train` shows which collectives it has launched, by number and group, and
which of them it waits for. For any other worker, its stack shows the collective but no number.

    numbers known     a rank that has not launched what another waits for is missing from it
    stacks only       a rank outside any collective, while others are in one, is missing from it
    other names       the ranks call different collectives: a deadlock
    other groups      each waits for one that waits in another group: a deadlock
    none missing      all wait in the same one: the network, or a peer that is gone
    no stack          the rank is unknown: it counts as neither waiting nor missing
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from posixpath import basename
from typing import Any, NamedTuple

from torchelastic.events import types as events

#: The group that all ranks are in, as torch counts groups.
WORLD = "0"
#: Operations between two ranks: the other ranks need not take part.
_BETWEEN_TWO = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
#: Characters of one rank's stack, and of all stacks of an event: lines of more than a megabyte are
#: not sent to the leader.
STACK_LIMIT, STACKS_LIMIT = 8_000, 400_000
#: Ranks that an event lists: those missing come first.
RANKS_LIMIT = 1024
_LEFT_OUT = "omitted: too many different stacks"


class Collective(NamedTuple):
    """An operation of a group, by its number in that group; 0: unknown."""

    name: str
    number: int = 0
    group: str = WORLD

    def __str__(self) -> str:
        number = f" #{self.number}" if self.number else ""
        return f"{self.name}{number}{'' if self.group == WORLD else f' of group {self.group}'}"


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """The activity of one rank."""

    rank: int
    node: str
    step: int | None = None
    #: The collective that its training thread waits for.
    waits: Collective | None = None
    #: The last one it has launched in each of its groups; empty: they are not counted.
    launched: tuple[Collective, ...] = ()
    #: Stopped by a signal or a debugger: wherever it was, it keeps the others waiting.
    frozen: bool = False
    stack: str = ""

    @property
    def in_collective(self) -> Collective | None:
        """The collective it waits in, as reported or as its stack shows."""
        if self.frozen:
            return None
        return self.waits if self.waits or self.launched else collective_in(self.stack)

    @property
    def is_known(self) -> bool:
        """True if something shows its activity; a rank that shows nothing may wait like others."""
        return self.frozen or bool(self.waits or self.launched) or bool(_frames(self.stack))

    @property
    def last(self) -> Collective | None:
        """The collective it waits in, or else the last it launched."""
        return self.in_collective or (self.launched[0] if self.launched else None)

    def as_last(self) -> dict[str, Any]:
        """Return the collectives of a failing worker as fields of its failure."""
        if self.last is None:
            return {}
        of_all = [one.number for one in self.launched if one.group == WORLD]
        return {
            "collective": f"{self.last}, waiting for others" if self.waits else str(self.last),
            "entered": of_all[0] if of_all else -1,
            "waited": self.waits is not None,
        }


class HangDiagnosis(NamedTuple):
    """The diagnosis as a sentence, and the missing ranks."""

    text: str
    missing: tuple[int, ...] = ()
    #: Some rank waits for others.
    waited: bool = False
    #: The activity of every rank was known.
    sure: bool = True
    #: All ranks wait, in different collectives: no time will end that.
    deadlock: bool = False


def first_in_line(activities: Iterable[RankActivity]) -> int:
    """Return the rank that speaks for all if all wait: the lowest of those that are furthest, whose
    time is up first."""
    return min(activities, key=lambda one: (-(one.step or 0), one.rank)).rank


def diagnose(activities: Iterable[RankActivity], unheard: Sequence[str] = ()) -> HangDiagnosis:
    """Find the ranks of a hung world that keep the others waiting."""
    ranks = sorted(activities, key=lambda one: one.rank)
    waiting = {one.rank: at for one in ranks if (at := one.in_collective) is not None}
    gaps = _gaps([one.rank for one in ranks if not one.is_known], unheard)
    found = _judge(ranks, waiting, is_all=not gaps)
    sure, deadlock = not gaps, found.deadlock and not gaps
    return HangDiagnosis(
        "; ".join([found.text, *gaps]), found.missing, bool(waiting), sure, deadlock
    )


def _gaps(unknown: Sequence[int], unheard: Sequence[str]) -> list[str]:
    """Return what could not be found out."""
    gaps = []
    if unknown:
        gaps.append(f"{listed(unknown)} could not be inspected")
    if unheard:
        more = f" and {len(unheard) - 8} more" if len(unheard) > 8 else ""
        gaps.append(f"{', '.join(unheard[:8])}{more} did not answer")
    return gaps


def _judge(
    ranks: Sequence[RankActivity], waiting: Mapping[int, Collective], *, is_all: bool
) -> HangDiagnosis:
    idle = [one for one in ranks if one.rank not in waiting and one.is_known]
    if not waiting:
        return HangDiagnosis(f"no rank waits in a collective{f': {_each(idle)}' if idle else ''}")
    if differing := _mismatch(ranks, waiting):
        return differing._replace(deadlock=not idle)
    waited = sorted(set(waiting.values()), key=lambda at: (at.group, at.number, at.name))
    for at in waited:
        if missing := [one for one in idle if _is_missing(one, at)]:
            return _missing(missing, at, waiting)
    if not idle and _is_circle(ranks, waiting):
        text = f"{_who_waits(waiting)}: they wait for each other, in different groups"
        return HangDiagnosis(text, deadlock=True)
    for at in waited:
        elsewhere = [one for one in ranks if waiting.get(one.rank, at).group != at.group]
        if missing := [one for one in elsewhere if _is_missing(one, at)]:
            return _missing(missing, at, waiting)
    if idle:
        text = f"{_who_waits(waiting)}; no rank is missing from it; {_each(idle)}"
        return HangDiagnosis(text, tuple(one.rank for one in idle))
    if not is_all:
        return HangDiagnosis(_who_waits(waiting))
    return HangDiagnosis(
        f"{_who_waits(waiting)}; no rank is missing: check the network between the nodes"
    )


def _missing(
    missing: Sequence[RankActivity], at: Collective, waiting: Mapping[int, Collective]
) -> HangDiagnosis:
    inside = sorted(rank for rank, where in waiting.items() if where == at)
    is_or_are, wait = _verbs(missing, "is", "are"), _verbs(inside, "waits", "wait")
    text = f"{_named(missing)} {is_or_are} missing from {at}, in which {listed(inside)} {wait}"
    return HangDiagnosis(text, tuple(one.rank for one in missing))


def _is_missing(one: RankActivity, at: Collective) -> bool:
    if not one.launched or not at.number:
        return True
    launched = [last for last in one.launched if last.group == at.group]
    if not launched:
        return at.group == WORLD  # a rank that launched nothing in another group is not in it
    return one.frozen or launched[0].number < at.number


def _is_circle(ranks: Sequence[RankActivity], waiting: Mapping[int, Collective]) -> bool:
    """Return whether some ranks wait for each other: none of them can be the first to go on."""
    awaited = {
        one.rank: {
            other.rank
            for other in ranks
            if other is not one and other.launched and _is_missing(other, waiting[one.rank])
        }
        for one in ranks
        if one.rank in waiting and waiting[one.rank].number
    }
    while free := [rank for rank, others in awaited.items() if not others & awaited.keys()]:
        for rank in free:
            del awaited[rank]
    return bool(awaited)


def _mismatch(
    ranks: Sequence[RankActivity], waiting: Mapping[int, Collective]
) -> HangDiagnosis | None:
    """Find ranks that call different collectives where all must call the same one."""
    names: dict[tuple[str, int], dict[str, list[int]]] = {}
    for one in ranks:
        for at in {*one.launched, *([one.in_collective] if one.in_collective else [])}:
            counts = at.number or len(waiting) == len(ranks)
            if counts and at.name not in _BETWEEN_TWO:
                same = names.setdefault((at.group, at.number), {})
                same.setdefault(at.name, []).append(one.rank)
    for (group, number), by_name in sorted(names.items()):
        inside = any((at.group, at.number) == (group, number) for at in waiting.values())
        if len(by_name) > 1 and inside:
            calls = "; ".join(
                f"{listed(who)} in {Collective(name, number, group)}"
                for name, who in sorted(by_name.items(), key=lambda item: item[1])
            )
            return HangDiagnosis(
                f"the ranks call different collectives ({calls}): all ranks must call the same "
                "collectives in the same order"
            )
    return None


def _who_waits(waiting: Mapping[int, Collective]) -> str:
    by_collective: dict[Collective, list[int]] = {}
    for rank, at in sorted(waiting.items()):
        by_collective.setdefault(at, []).append(rank)
    waits = [
        f"{listed(who)} {_verbs(who, 'waits', 'wait')} in {at}" for at, who in by_collective.items()
    ]
    return ", ".join(waits[:4]) + (f" and {len(waits) - 4} more" if len(waits) > 4 else "")


def _each(ranks: Sequence[RankActivity]) -> str:
    state = "stopped" if all(one.frozen for one in ranks) else "outside any collective"
    return f"{_named(ranks)} {_verbs(ranks, 'is', 'are')} {state}"


def _verbs(ranks: Sequence[object], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _named(ranks: Sequence[RankActivity]) -> str:
    """`rank 3 (frozen)`, `ranks 3-5`."""
    well = [one.rank for one in ranks if not one.frozen]
    frozen = [one.rank for one in ranks if one.frozen]
    parts = [listed(well)] if well else []
    return " and ".join([*parts, f"{listed(frozen)} (frozen)"] if frozen else parts)


def listed(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-6, 9`.

    >>> listed([3]), listed([9, 0, 1, 2])
    ('rank 3', 'ranks 0-2, 9')
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    single = len(runs) == 1 and len(runs[0]) == 1
    return f"{'rank' if single else 'ranks'} {', '.join(texts)}" if runs else "no rank"


# --- stacks --------------------------------------------------------------------------------------

_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>\S+)')
#: The line above a thread's frames: one of several threads, or the only one shown.
_BLOCK = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+|Stack \(most).*\n", re.MULTILINE)
_C10D = "torch/distributed/distributed_c10d.py"
#: Its frames surround every collective of torch.distributed.
_LOGGER = "torch/distributed/c10d_logger.py"
#: Where C++ waits for a collective that the script did not call itself.
_UNSEEN = {
    "torch/autograd/graph.py": "backward",
    "torch/nn/parallel/distributed.py": "the forward of DDP",
}


def tidy(dump: str, limit: int = STACK_LIMIT) -> str:
    """Normalize a `faulthandler` dump, so that equal stacks of two processes are equal texts.

    The main thread, which `faulthandler` writes last, comes first; the thread that answers the
    agent is left out. Text beyond `limit`, the outermost frames, is cut.
    """
    parts = _BLOCK.split(dump)[1:]
    if not parts:
        return dump.strip()[:limit]
    *others, main = [part.strip("\n") for part in parts]
    kept = [f"main thread, most recent call first:\n{main}"]
    kept += [f"another thread:\n{one}" for one in others if not _answers_the_agent(one)]
    return "\n".join(kept)[:limit]


def _answers_the_agent(block: str) -> bool:
    return "torchelastic/training/control.py" in block


def _frames(stack: str) -> list[tuple[str, str]]:
    """Return file and function of the main thread's frames; none if the text holds no stack."""
    main = stack.partition("another thread:")[0]
    return [(found["file"], found["name"]) for found in _FRAME.finditer(main)]


def where(stack: str) -> str:
    """Return the main thread's innermost frame as `load (data.py, line 12)`; empty without one."""
    found = _FRAME.search(stack.partition("another thread:")[0])
    return f"{found['name']} ({basename(found['file'])}, line {found['line']})" if found else ""


def collective_in(stack: str) -> Collective | None:
    """Return the torch.distributed collective that the main thread is in, by its frames."""
    frames = _frames(stack)
    inside = takewhile(lambda frame: frame[0].endswith((_C10D, _LOGGER)), frames)
    called = [name for file, name in inside if file.endswith(_C10D)]
    if called:
        return Collective(called[-1])  # the outermost: all_gather_object, not the all_gather in it
    for file, what in _UNSEEN.items():
        if frames and frames[0][0].endswith(file):
            return Collective(what)
    return None


# --- the event -----------------------------------------------------------------------------------


def event_of(activities: Iterable[RankActivity], unheard: Sequence[str] = ()) -> events.Hang:
    """Return the `hang` event, of bounded size."""
    ranks = sorted(activities, key=lambda one: one.rank)
    found = diagnose(ranks, unheard)
    missing = set(found.missing)
    chosen = sorted(ranks, key=lambda one: one.rank not in missing)[:RANKS_LIMIT]
    stacks: dict[str, int] = {}
    rows = []
    room = STACKS_LIMIT
    for one in chosen:
        stack = one.stack[:STACK_LIMIT]
        if stack not in stacks and len(stack) > room:
            stack = _LEFT_OUT
        if stack not in stacks:
            stacks[stack] = len(stacks)
            room -= len(stack)
        rows.append({**row(one), "missing": one.rank in missing, "stack": stacks[stack]})
    rows.sort(key=lambda each: int(each["rank"]))
    return events.Hang(
        text=found.text,
        missing=list(found.missing),
        ranks=rows,
        stacks=list(stacks),
        unheard=list(unheard),
    )


def row(one: RankActivity) -> dict[str, Any]:
    """Return what is shown of a rank besides its stack."""
    return {
        "rank": one.rank,
        "node": one.node,
        "step": one.step,
        "collective": str(one.last) if one.last is not None else "",
        "waiting": one.in_collective is not None,
    }


def part(event: events.Hang) -> dict[str, Any]:
    """Return what a view of the job shows of a hang: the stacks with their ranks."""

    def stack_of(each: events.Json) -> str:
        place = each.get("stack")
        if isinstance(place, int) and 0 <= place < len(event.stacks):
            return event.stacks[place]
        return ""

    return {
        "text": event.text,
        "missing": list(event.missing),
        "ranks": [{**each, "stack": stack_of(each)} for each in event.ranks],
    }
