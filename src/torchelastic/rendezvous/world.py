"""What travels through the store: what a node says of itself, and the world the leader decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchelastic.failure import Failure
from torchelastic.rendezvous.restart_policy import Kind, RestartLedger


@dataclass(frozen=True, kw_only=True)
class Member:
    """What an agent says of its node. Only that agent writes it."""

    node: str
    #: For people: host name, and a number where several agents share a host.
    name: str
    #: Where other nodes reach this one.
    addr: str
    nproc: int
    role: str = "default"
    #: The place asked for in a static rendezvous.
    node_rank: int | None = None
    #: `host:port` of a store nobody has used yet, offered for the next generation.
    store: str = ""
    #: Whether workers could start at once; newcomers are admitted only then.
    ready: bool = False
    #: No worker of this generation or an older one is left here.
    gone: int = -1
    #: The generation in which every worker here succeeded.
    done: int = -1
    #: The highest step a worker here has reported.
    step: int = -1
    #: What went wrong here in the current generation, first thing first.
    failures: tuple[Failure, ...] = ()
    #: Announced departure; the signal or reason, empty while staying.
    leaving: str = ""
    #: The workers here outlive their generation (`torchelastic.train`). What follows is about such.
    resident: bool = False
    #: Local ranks of the workers that are in a world or could enter one.
    standing: tuple[int, ...] = ()
    #: How many workers are on their way there.
    starting: int = 0
    #: The generation whose workers here have been asked for their step, and enter no other one;
    #: the largest step they have entered.
    paused: int = -1
    entered: int = -1
    #: The generation in which a worker here has come to the end of its data, and after how many
    #: committed steps.
    finished: int = -1
    finished_after: int = -1

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Member:
        made = _known(cls, data)
        made["failures"] = tuple(Failure.from_json(item) for item in made.get("failures", ()))
        made["standing"] = tuple(made.get("standing", ()))
        return cls(**made)


@dataclass(frozen=True, kw_only=True)
class WorldNode:
    """A node's place in a world."""

    node: str
    name: str
    addr: str
    #: Workers it has in the world.
    nproc: int
    role: str
    #: Global rank of its first worker; the others follow.
    first_rank: int
    first_role_rank: int
    #: Which of its workers are in the world; their ranks follow this order.
    local_ranks: tuple[int, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorldNode:
        made = _known(cls, data)
        made["local_ranks"] = tuple(made["local_ranks"])
        return cls(**made)


@dataclass(frozen=True, kw_only=True)
class World:
    """The leader's last word: which generation, who is in it, and how it stands."""

    generation: int
    #: `waiting` for nodes; `running`; `pausing` (resident workers are asked for their step); `over`
    #: (workers are being stopped); `closed` (job ended).
    phase: Literal["waiting", "running", "pausing", "over", "closed"]
    nodes: tuple[WorldNode, ...] = ()
    #: `host:port` of the store made for this generation alone.
    store: str = ""
    #: What ended it, once it is over.
    ending: Kind | None = None
    #: Why the world is as it is, in a sentence.
    reason: str = ""
    #: What the job has spent on restarts, up to and including this generation.
    ledger: RestartLedger = field(default_factory=RestartLedger)
    #: The first failure of the last generation that failed, and those that fell because of it.
    cause: Failure | None = None
    consequences: tuple[Failure, ...] = ()
    #: Its workers outlive it: they are told of the next world instead of being stopped.
    resident: bool = False
    #: The step that the workers of the last generation run through before they enter this one, or,
    #: of a world that is over, before they stop; None: they stop at once. In a world that is over
    #: because the training is done: the last step of it.
    after: int | None = None
    #: Nodes of the last generation that have no place in this one, but run through that step, too.
    handing_over: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    #: Exit code every agent ends with once closed.
    exitcode: int = 0

    @property
    def size(self) -> int:
        """Workers in the world."""
        return sum(node.nproc for node in self.nodes)

    def place(self, node: str) -> int | None:
        """The node rank of a node; None if it is no member."""
        for index, member in enumerate(self.nodes):
            if member.node == node:
                return index
        return None

    def rank(self, node: str, local_rank: int) -> int | None:
        """The rank of a worker; None if it is not in the world."""
        place = self.place(node)
        if place is None or local_rank not in self.nodes[place].local_ranks:
            return None
        found = self.nodes[place]
        return found.first_rank + found.local_ranks.index(local_rank)

    def role_size(self, role: str) -> int:
        """Workers with this role."""
        return sum(node.nproc for node in self.nodes if node.role == role)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> World:
        made = _known(cls, data)
        made["nodes"] = tuple(WorldNode.from_json(node) for node in made["nodes"])
        if made.get("cause") is not None:
            made["cause"] = Failure.from_json(made["cause"])
        made["ledger"] = RestartLedger(**_known(RestartLedger, made["ledger"]))
        made["consequences"] = tuple(Failure.from_json(item) for item in made["consequences"])
        for name in ("spares", "missing", "handing_over"):
            made[name] = tuple(made[name])
        return cls(**made)


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `data` that `cls` knows: a newer peer may say more than we understand."""
    names = {item.name for item in dataclasses.fields(cls)}
    return {key: value for key, value in data.items() if key in names}
