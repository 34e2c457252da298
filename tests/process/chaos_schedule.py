"""A schedule of faults, made from a seed. Pure: the same seed gives the same faults.

Nodes are lost only while there are as many as at the start, so that most of those who trained last
are left; and only then two workers are killed at once, so that one of three is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

#: Nodes at the start, and at most.
NODES, MOST_NODES = 3, 4
#: Steps from one fault to the next, at most.
GAP = 3
#: For so many faults after a join no whole node is touched, if others are left to do: a node takes
#: seconds to start, and workers may be killed meanwhile.
STARTING = 4

#: Of every 50: how many of each kind. As many joins as nodes that are lost for good.
KINDS = {
    "kill": 30,
    "kill-entering": 4,
    "freeze": 3,
    "kill-node": 3,
    "leave": 2,
    "join": 5,
    "freeze-node": 3,
}
LOSING = ("kill-node", "leave")
#: What needs as many nodes as there were at the start.
NEED_ENOUGH = (*LOSING, "freeze-node", "kill-entering")

#: Where in a step a worker is killed, in the order in which it passes them.
PLACES = {
    "train": (
        "here",
        "collective.before",
        "collective.launched",
        "collective.after",
        "optimizer.before",
        "optimizer.inside,n=2",
        "optimizer.after",
        "step.end",
    ),
    "sharded": (
        "here",
        *(f"collective.before,n={number}" for number in (1, 2, 3, 4, 5, 6, 7, 8)),
        *(f"collective.launched,n={number}" for number in (1, 3, 5, 7)),
        *(f"collective.after,n={number}" for number in (2, 4, 6, 8)),
        "joint.before",
        "joint.after",
        "optimizer.before",
        "optimizer.inside,n=2",
        "optimizer.after",
        "step.end",
    ),
    "script": (
        "here",
        "step.begin",
        "optimizer.before",
        "optimizer.inside",
        "optimizer.after",
        "snapshot.begun",
        "snapshot.skeleton",
        "snapshot.sealing",
        "snapshot.begun,n=2",
        "snapshot.copy",
        "snapshot.sealing,n=2",
        "step.end",
    ),
}
#: Where one is killed on its way into a world.
ENTERING = {
    "train": ("group.build", "sync.begin", "sync.end"),
    "sharded": ("group.build", "group.build,n=3", "sync.begin", "sync.end"),
    "script": ("sync.begin", "sync.end"),
}
FREEZING = {
    "train": ("collective.before", "collective.after", "optimizer.after"),
    "sharded": ("collective.before,n=4", "collective.after,n=5", "joint.before", "optimizer.after"),
    "script": ("step.begin", "optimizer.before"),
}


@dataclass(frozen=True)
class Fault:
    """A fault, its victim, and the step at which it happens."""

    number: int
    at_step: int
    kind: str
    #: Which rank or node: modulo how many there are then.
    target: int
    place: str = ""

    @property
    def is_of_first(self) -> bool:
        """Whether only the first worker of a node passes the place: it writes what is shared."""
        return self.place in ("snapshot.begun,n=2", "snapshot.copy", "snapshot.sealing,n=2")

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"{self.number}: {self.kind}{where}, target {self.target}, from step {self.at_step}"


def schedule(
    seed: int, mode: str, kinds: Mapping[str, int] = KINDS, nodes: int = NODES
) -> list[Fault]:
    """So many faults of each kind, in an order that keeps enough nodes."""
    chance = random.Random(seed)
    deck, step, starting, enough = Counter(kinds), 1, 0, nodes
    made: list[Fault] = []
    while deck.total():
        kind = chance.choice(_allowed(deck, nodes, enough, starting))
        deck[kind] -= 1
        nodes += (kind == "join") - (kind in LOSING)
        starting = STARTING if kind == "join" else starting - 1
        step += chance.randint(1, GAP)
        place = _place(chance, kind, mode)
        made.append(Fault(len(made), step, kind, chance.randrange(60), place))
    return made


def _allowed(deck: Counter[str], nodes: int, enough: int, starting: int) -> list[str]:
    """The faults that may come next: each kind as often as it is left. To the last node, only
    another one that joins it."""
    if nodes == 1 and deck["join"]:
        return ["join"]
    may = [kind for kind in deck.elements() if kind != "join" or nodes < MOST_NODES]
    may = [kind for kind in may if kind not in NEED_ENOUGH or nodes >= enough]
    return [kind for kind in may if kind not in NEED_ENOUGH or starting <= 0] or may


def _place(chance: random.Random, kind: str, mode: str) -> str:
    places = {"kill": PLACES, "kill-entering": ENTERING, "freeze": FREEZING}.get(kind)
    return chance.choice(places[mode]) if places else ""
