"""Nodes that are held out of the next worlds because they keep failing. Pure.

A held-out node stays a member and a spare: warm, and still a voter. Each hold is twice as long as
the one before, unless the node was only lost and came back. A world that cannot be formed without
the node includes it anyway (`choosing.choose`).

The list is part of the world, so the next leader has it. Only the leader knows when a hold began,
by its own clock: the next leader restarts the running holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchelastic.backoff import pause
from torchelastic.events import words

#: Seconds of the first hold, and of the longest.
FIRST_HOLD, LONGEST_HOLD = 60.0, 3600.0
#: Seconds of each hold of a node that keeps being lost. Only an agent that comes back by itself is
#: held out for that, one that is restarted is not: its network may be in order again.
LOST_HOLD = 15.0
#: Failures that do not hold a node out, unless there is other evidence against it (`hold`).
FAILURES_ALLOWED = 2
#: Seconds of a world after which earlier failures of its nodes are forgotten.
FORGIVE_AFTER = 600.0
#: The most nodes in the list; every node receives it.
NODES_LIMIT = 64
#: The most characters of a reason.
REASON_LENGTH_LIMIT = 300


class HeldOut(NamedTuple):
    """A node that has failed: the number of failures, and how long it is held out now."""

    node: str
    name: str
    times: int
    #: The length of its hold; 0: it is not held out.
    seconds: float
    reason: str
    #: A node that it could not connect to, which may be to blame instead; empty: none.
    other: str = ""
    #: It cannot hand over its state: its workers fail at start.
    unable: bool = False
    #: It computed other bits than the others, which time does not cure.
    other_bits: bool = False

    def span(self) -> str:
        """`60 s`, `2 min`."""
        return f"{self.seconds:g} s" if self.seconds <= FIRST_HOLD else words.span(self.seconds)

    def sentence(self) -> str:
        return f"held out for {self.span()}: {self.reason}"

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> HeldOut:
        """Read the JSON list; a newer peer may append fields."""
        return cls(*data[: len(cls._fields)])


HeldOutNodes = tuple[HeldOut, ...]


def hold(
    held: HeldOutNodes, node: str, name: str, reason: str, other: str = "", *, unable: bool = False
) -> HeldOutNodes:
    """Hold a node out, twice as long each time. `other` is a node that may be to blame instead.

    >>> held = hold((), "b", "node-b", "no GPU")
    >>> [(one.name, one.seconds) for one in held]
    [('node-b', 60.0)]
    >>> [one.seconds for one in hold(held, "b", "node-b", "no GPU")]
    [120.0]
    """
    times = max(_times(held, node), FAILURES_ALLOWED) + 1
    return _note(held, HeldOut(node, name, times, _seconds(times), reason, other, unable))


def note_failure(
    held: HeldOutNodes,
    node: str,
    name: str,
    reason: str,
    *,
    unable: bool = False,
    longest: float = LONGEST_HOLD,
) -> HeldOutNodes:
    """Count a failure of a node; one that keeps failing is held out, at most for `longest`."""
    times = _times(held, node) + 1
    seconds = min(_seconds(times), longest)
    return _note(held, HeldOut(node, name, times, seconds, reason, unable=unable))


def note_other_bits(
    held: HeldOutNodes, node: str, name: str, reason: str, *, at_once: bool
) -> HeldOutNodes:
    """Note that a node computed other bits than the others. It is held out `at_once`, or the second
    time, and for long: another try interrupts the others, and can hardly end better.

    >>> held = note_other_bits((), "b", "node-b", "differs", at_once=False)
    >>> [one.seconds for one in note_other_bits(held, "b", "node-b", "differs", at_once=False)]
    [3600.0]
    """
    before = next((one for one in held if one.node == node and one.other_bits), None)
    seconds = 0.0 if before is None and not at_once else LONGEST_HOLD
    times = _times(held, node) + 1
    return _note(held, HeldOut(node, name, times, seconds, reason, unable=True, other_bits=True))


def forgive(held: HeldOutNodes, nodes: Collection[str]) -> HeldOutNodes:
    """Forget earlier failures of these nodes, except other bits."""
    return tuple(one for one in held if one.node not in nodes or one.other_bits)


def _note(held: HeldOutNodes, new: HeldOut) -> HeldOutNodes:
    """The list with this node last; unchanged if it is full of held-out nodes. Nodes that were held
    out because of this one are released."""
    others = tuple(one for one in forget(held, [new.node]) if one.other != new.node)
    if len(others) >= NODES_LIMIT:
        others = tuple(one for one in others if one.seconds)
    if len(others) >= NODES_LIMIT:
        return held
    return (*others, new._replace(reason=" ".join(new.reason.split())[:REASON_LENGTH_LIMIT]))


def _times(held: HeldOutNodes, node: str) -> int:
    return next((one.times for one in held if one.node == node), 0)


def _seconds(times: int) -> float:
    """
    >>> [_seconds(times) for times in (1, 2, 3, 4, 5, 99)]
    [0.0, 0.0, 60.0, 120.0, 240.0, 3600.0]
    """
    return pause(times - FAILURES_ALLOWED, FIRST_HOLD, LONGEST_HOLD)


def end_all_but(held: HeldOutNodes, nodes: Collection[str]) -> HeldOutNodes:
    """End the holds of all nodes but these; their failures stay counted."""
    return tuple(one if one.node in nodes else one._replace(seconds=0.0) for one in held)


def forget(held: HeldOutNodes, nodes: Collection[str]) -> HeldOutNodes:
    """Clear these nodes."""
    return tuple(one for one in held if one.node not in nodes)


# --- on the leader's clock -----------------------------------------------------------------------


def begun(
    since: Mapping[str, float], before: Iterable[HeldOut], held: Iterable[HeldOut], now: float
) -> dict[str, float]:
    """The times when each hold began, after the list has changed."""
    known = set(before)
    return {
        one.node: since.get(one.node, now) if one in known else now for one in held if one.seconds
    }


def ends(held: Iterable[HeldOut], since: Mapping[str, float]) -> dict[str, float]:
    """The times when each hold ends, by node."""
    return {one.node: since[one.node] + one.seconds for one in held if one.node in since}
