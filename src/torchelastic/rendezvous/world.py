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

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Member:
        made = _known(cls, data)
        made["failures"] = tuple(Failure.from_json(item) for item in made.get("failures", ()))
        return cls(**made)


@dataclass(frozen=True, kw_only=True)
class WorldNode:
    """A node's place in a world."""

    node: str
    name: str
    addr: str
    nproc: int
    role: str
    #: Global rank of its first worker; the others follow.
    first_rank: int
    first_role_rank: int


@dataclass(frozen=True, kw_only=True)
class World:
    """The leader's last word: which generation, who is in it, and how it stands."""

    generation: int
    #: `waiting` for nodes; `running`; `over` (workers are being stopped); `closed` (job ended).
    phase: Literal["waiting", "running", "over", "closed"]
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

    def role_size(self, role: str) -> int:
        """Workers with this role."""
        return sum(node.nproc for node in self.nodes if node.role == role)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> World:
        made = _known(cls, data)
        made["nodes"] = tuple(WorldNode(**_known(WorldNode, node)) for node in made["nodes"])
        if made.get("cause") is not None:
            made["cause"] = Failure.from_json(made["cause"])
        made["ledger"] = RestartLedger(**_known(RestartLedger, made["ledger"]))
        made["consequences"] = tuple(Failure.from_json(item) for item in made["consequences"])
        for name in ("spares", "missing"):
            made[name] = tuple(made[name])
        return cls(**made)


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `data` that `cls` knows: a newer peer may say more than we understand."""
    names = {item.name for item in dataclasses.fields(cls)}
    return {key: value for key, value in data.items() if key in names}
