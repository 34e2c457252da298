"""Nodes that are held out of the next worlds because they keep failing. Pure.

A held-out node stays a member and a spare: warm, and a voter if it was one. Its hold doubles each
time, and ends when the time is up. A world that cannot be formed without the node includes it
anyway (`forming.choose`).

The list is part of the world, so the next leader has it. Only the leader knows when a hold began,
by its own clock: the next leader restarts the running holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchelastic.events import words

#: Seconds of the first hold, and of the longest.
FIRST, LONGEST = 60.0, 3600.0
#: Failures that are no reason to hold a node out, unless something tells against it (`hold`).
ALLOWED = 2
#: What the nodes of a world did before is forgotten if it lived this long, in seconds.
FORGOTTEN_AFTER = 600.0
#: Nodes of which it is known; every node is sent the list.
MOST = 64
#: Characters of a reason.
MOST_WORDS = 300


class HeldOut(NamedTuple):
    """A node that has failed: how often, and how long it is held out now."""

    node: str
    name: str
    times: int
    #: 0: it is not held out, or no longer.
    seconds: float
    reason: str
    #: A node that it could not talk to, and that may have been to blame instead; empty: none.
    other: str = ""
    #: It could not hand a state over: others could not talk to it, or its workers fail at start.
    unable: bool = False

    def span(self) -> str:
        """`60 s`, `2 min`."""
        return f"{self.seconds:g} s" if self.seconds <= FIRST else words.span(self.seconds)

    def sentence(self) -> str:
        return f"held out for {self.span()}: {self.reason}"

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> HeldOut:
        """Read the JSON list; a newer peer may append fields."""
        return cls(*data[: len(cls._fields)])


Held = tuple[HeldOut, ...]


def hold(
    held: Held, node: str, name: str, reason: str, other: str = "", *, unable: bool = False
) -> Held:
    """Hold a node out, for longer each time; because of `other`, or so it may turn out.

    >>> held = hold((), "b", "node-b", "no GPU")
    >>> [(one.name, one.seconds) for one in held]
    [('node-b', 60.0)]
    >>> [one.seconds for one in hold(held, "b", "node-b", "no GPU")]
    [120.0]
    """
    times = max(_times(held, node), ALLOWED) + 1
    return _note(held, HeldOut(node, name, times, _seconds(times), reason, other, unable))


def note_failure(held: Held, node: str, name: str, reason: str, *, unable: bool = False) -> Held:
    """Count a failure of a node; one that keeps failing is held out."""
    times = _times(held, node) + 1
    return _note(held, HeldOut(node, name, times, _seconds(times), reason, unable=unable))


def _note(held: Held, new: HeldOut) -> Held:
    """The list with this node last; unchanged if it is full of nodes that are held out. A node that
    was held out because of this one is released."""
    others = tuple(one for one in forget(held, [new.node]) if one.other != new.node)
    if len(others) >= MOST:
        others = tuple(one for one in others if one.seconds)
    if len(others) >= MOST:
        return held
    return (*others, new._replace(reason=" ".join(new.reason.split())[:MOST_WORDS]))


def _times(held: Held, node: str) -> int:
    return next((one.times for one in held if one.node == node), 0)


def _seconds(times: int) -> float:
    """
    >>> [_seconds(times) for times in (1, 2, 3, 4, 5, 99)]
    [0.0, 0.0, 60.0, 120.0, 240.0, 3600.0]
    """
    if times <= ALLOWED:
        return 0.0
    return min(FIRST * 2.0 ** min(times - ALLOWED - 1, 20), LONGEST)


def end_all_but(held: Held, nodes: Collection[str]) -> Held:
    """End the holds of all nodes but these; their failures stay counted."""
    return tuple(one if one.node in nodes else one._replace(seconds=0.0) for one in held)


def forget(held: Held, nodes: Collection[str]) -> Held:
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
