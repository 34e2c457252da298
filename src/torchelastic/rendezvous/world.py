"""The records in the store: a node's member record, and the world the leader decided.

A world is stored in pieces, so that a change costs each node as much with thousands of nodes as
with two: a *summary* of constant size at one key, and the list of nodes in *parts*. A node's place
is in the part that its id hashes to; the node fetches that part, and holds a `World` that lists
only the nodes of its part, and totals for all. A reader that needs every node combines all parts.
The summary changes with every phase, and is short; what lasts as long as the list is in the parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

from torchelastic.events.failure import Failure
from torchelastic.records import replace
from torchelastic.rendezvous.held_out import Held, HeldOut
from torchelastic.rendezvous.restart_policy import Kind, RestartLedger

LEADER_KEY = "leader"
MEMBER_PREFIX = "member/"
WORLD_KEY = "world"
PART_PREFIX = "part/"
#: Nodes of a part, about; a world of no more than this is in one part.
PART_NODES = 16
#: How many nodes a world names as possible hosts of the embedded store.
CANDIDATES = 16
#: How many nodes are named where people are told of many.
NAMED = 32

Json = dict[str, Any]
T = TypeVar("T")


class Base(NamedTuple):
    """The version that a generation of scripts that keep their state began from: what older
    generations did beyond it is void. Nodes outside its world learn it from the leader."""

    generation: int
    #: The version: the generation that wrote it, and its step.
    written: int
    step: int

    @classmethod
    def from_json(cls, data: Sequence[int] | None) -> Base | None:
        return None if data is None else cls(*data)


@dataclass(frozen=True, kw_only=True)
class Member:
    """An agent's record of its node. Only that agent writes it."""

    node: str
    #: For people: host name, and a number where several agents share a host.
    name: str
    #: Where other nodes reach this one.
    addr: str
    nproc: int
    role: str = "default"
    #: `host:port` at which this agent takes connections of other agents.
    peer: str = ""
    #: The place asked for in a static rendezvous.
    node_rank: int | None = None
    #: The digest of its `Agreement`.
    agreement: str = ""
    #: `host:port` of a store nobody has used yet, offered for the next generation.
    store: str = ""
    #: The token that it reads at the witness; empty: it has none, or cannot reach it.
    witness: str = ""
    #: Whether workers could start at once; newcomers are admitted only then.
    ready: bool = False
    #: Why this node does not get ready before its user or time mends it; empty while it may.
    unfit: str = ""
    #: Nodes to which this one's connections have ended, or that are silent there.
    doubts: tuple[str, ...] = ()
    #: The newest generation that this node has seen running.
    accepted: int = -1
    #: No worker of this generation or an older one is left here.
    gone: int = -1
    #: The generation in which every worker here succeeded.
    done: int = -1
    #: The highest step a worker here has reported.
    step: int = -1
    #: The newest generation in which a worker here has taken a step.
    trained: int = -1
    #: The newest generation whose state is in memory here; -1: none is.
    holds: int = -1
    #: What the newest generation began from whose workers here have restored what is kept.
    base: Base | None = None
    #: What went wrong here in the current generation, first thing first.
    failures: tuple[Failure, ...] = ()
    #: Its agent has just been started, in the place of one that ended.
    resumed: bool = False
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

    def to_json(self) -> Json:
        """Everything that differs from its default: records are sent often, and few fields do."""
        made = {
            name: value
            for name, value in vars(self).items()
            if name not in _MEMBER_DEFAULTS or value != _MEMBER_DEFAULTS[name]
        }
        if self.failures:
            made["failures"] = [failure.to_json() for failure in self.failures]
        return made

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Member:
        made = _known(cls, data)
        if "failures" in made:
            made["failures"] = _failures(made["failures"])
        for name in ("standing", "doubts"):
            if name in made:
                made[name] = tuple(made[name])
        if "base" in made:
            made["base"] = Base.from_json(made["base"])
        return _made(cls, made)


@cache
def _defaults(cls: type) -> Json:
    """The fields that are not sent at their default."""
    made: Json = {}
    for item in dataclasses.fields(cls):
        if item.default is not dataclasses.MISSING:
            made[item.name] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            made[item.name] = item.default_factory()
    return made


_MEMBER_DEFAULTS = _defaults(Member)


class WorldNode(NamedTuple):
    """A node's place in a world."""

    node: str
    name: str
    addr: str
    #: Its place in the order of nodes.
    node_rank: int
    #: Workers it has in the world.
    nproc: int
    role: str
    #: Global rank of its first worker; the others follow.
    first_rank: int
    first_role_rank: int
    #: Which of its workers are in the world; their ranks follow this order.
    local_ranks: tuple[int, ...]
    #: `host:port` at which its agent takes connections of other agents.
    peer: str = ""
    #: It was not in the last world of the job that has trained.
    new: bool = False

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> WorldNode:
        """Read the JSON list: every node is sent many of them, and field names would be most of it.
        A newer peer may append fields."""
        made = [*data[: len(cls._fields)]]
        made[_LOCAL_RANKS] = tuple(made[_LOCAL_RANKS])
        return cls(*made)


_LOCAL_RANKS = WorldNode._fields.index("local_ranks")
_NODE, _PEER = WorldNode._fields.index("node"), WorldNode._fields.index("peer")
_by_rank = itemgetter(WorldNode._fields.index("node_rank"))


class Candidate(NamedTuple):
    """A node that may become the host of the embedded store, and the address of its agent."""

    node: str
    peer: str


@dataclass(frozen=True, kw_only=True)
class World:
    """The leader's decision: the generation, its nodes, and its phase.

    `nodes` may list only a part of them; `size`, `count` and `roles` are of all. Made for a list of
    nodes by `with_nodes`, which keeps the two consistent.
    """

    generation: int
    #: The first node of the first world: tells one start of a job from the next, whose generations
    #: begin anew.
    start: str = ""
    #: `waiting` for nodes; `agreeing` (taken up, and not to be begun before a majority has it);
    #: `running`; `pausing` (resident workers are asked for their step); `over`
    #: (workers are being stopped); `closed` (job ended).
    phase: Literal["waiting", "agreeing", "running", "pausing", "over", "closed"]
    #: The nodes this holder knows the places of, in the order of ranks.
    nodes: tuple[WorldNode, ...] = ()
    #: Workers in the world, nodes in it, and workers of each role.
    size: int = 0
    count: int = 0
    roles: Mapping[str, int] = field(default_factory=dict)
    #: In how many parts the list of nodes is stored, and what tells one list from another.
    shards: int = 1
    digest: str = ""
    #: The nodes that may host the embedded store, in their order, and where their agents are
    #: reached; the one that does host it, and how often that has changed.
    heirs: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    term: int = 0
    #: The token of the witness, where that has a vote in what follows.
    witness: str = ""
    #: `host:port` of the store made for this generation alone.
    store: str = ""
    #: What ended it, once it is over.
    ending: Kind | None = None
    #: The node, if any leaves, that puts the state of the generation that was over last into
    #: storage before it goes: one of those that leave, not all at once.
    saver: str = ""
    #: What the newest generation began from that a member has told of.
    base: Base | None = None
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
    #: In parts, as the nodes are.
    handing_over: tuple[str, ...] = ()
    #: Names of nodes that are there without a place, and of nodes of the last world that are not
    #: there: the first ones, and how many there are.
    spares: tuple[str, ...] = ()
    spare_count: int = 0
    missing: tuple[str, ...] = ()
    missing_count: int = 0
    #: Nodes that have failed lately, some of which are held out of the next worlds.
    held: Held = ()
    #: An earlier world of the job has trained.
    proven: bool = False
    #: Of one that waits: how many seconds it still did when this was said; None: any time.
    patience: float | None = None
    #: Of one that waits: enough nodes are there, and only get ready.
    enough: bool = False
    #: Exit code every agent ends with once closed.
    exitcode: int = 0

    # --- places ----------------------------------------------------------------------------------

    @cached_property
    def _by_node(self) -> dict[str, WorldNode]:
        return {node.node: node for node in self.nodes}

    @property
    def members(self) -> frozenset[str]:
        """The nodes whose places this holder knows."""
        return frozenset(self._by_node)

    def find(self, node: str) -> WorldNode | None:
        """A node's place; None if it is not a member."""
        return self._by_node.get(node)

    def place(self, node: str) -> int | None:
        """The node rank of a node; None if it is not a member."""
        found = self._by_node.get(node)
        return None if found is None else found.node_rank

    def rank(self, node: str, local_rank: int) -> int | None:
        """The rank of a worker; None if it is not in the world."""
        found = self._by_node.get(node)
        if found is None or local_rank not in found.local_ranks:
            return None
        return found.first_rank + found.local_ranks.index(local_rank)

    @property
    def is_under_way(self) -> bool:
        """Return whether its workers run, or are about to."""
        return self.phase in ("agreeing", "running", "pausing")

    @property
    def has_ended(self) -> bool:
        """Return whether no worker of it may be left: it is over, or was, and the job waits for
        nodes.

        The world in which a job begins to wait has no nodes, and the number of the first real one.
        """
        return self.phase == "over" or (self.phase == "waiting" and self.count > 0)

    def has_ended_for(self, node: str) -> bool:
        """Return whether the leader waits for a node to report that no worker of it is left
        there."""
        return self.has_ended and (self.phase == "over" or self.place(node) is not None)

    def steps_without(self, host: str) -> bool:
        """Return whether one node trains alone and its host does not: it needs nobody for a step,
        so the host continues without it only when its lease has ended. A refused connection proves
        nothing."""
        return self.count == 1 and self.place(host) is None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The failover candidates, one by one."""
        return tuple(Candidate(*pair) for pair in self.heirs.items())

    def role_size(self, role: str) -> int:
        """Workers with this role."""
        return self.roles.get(role, 0)

    # --- another one -----------------------------------------------------------------------------

    def without(self, node: str) -> World:
        """The world as seen by a node that was dropped, and has rejoined since it began."""
        if self.place(node) is None or self.phase not in ("running", "pausing"):
            return self
        reason = "the rendezvous dropped this node"
        return replace(self, phase="over", after=None, ending="node-failure", reason=reason)

    def with_nodes(self, nodes: Iterable[WorldNode], handing_over: Iterable[str] = ()) -> World:
        """The same world with all these nodes; totals are counted anew. The host stays a failover
        candidate: it has a vote, in the world or not."""
        nodes, handing_over = tuple(nodes), tuple(handing_over)
        host = {self.host: self.heirs[self.host]} if self.host in self.heirs else {}
        roles: dict[str, int] = {}
        for node in nodes:
            roles[node.role] = roles.get(node.role, 0) + node.nproc
        return replace(
            self,
            nodes=nodes,
            handing_over=handing_over,
            size=sum(roles.values()),
            count=len(nodes),
            roles=roles,
            shards=shards_for(len(nodes) + len(handing_over)),
            digest=_digest(nodes, handing_over),
            heirs={**{node.node: node.peer for node in _spread(nodes)}, **host},
        )

    def in_parts(self, most: int) -> World:
        """The same world in at most this many parts, however large they become."""
        return replace(self, shards=min(self.shards, most))

    # --- as JSON ---------------------------------------------------------------------------------

    def to_json(self) -> Json:
        """The world as this holder has it, the nodes included."""
        return {
            **self.summary(),
            "nodes": list(self.nodes),
            "handing_over": list(self.handing_over),
            "heirs": dict(self.heirs),
        }

    def summary(self) -> Json:
        """Everything but the list of nodes: sent to every node in every phase, with a size that
        does not grow with them. Default values are left out."""
        made = {
            name: getattr(self, name)
            for name in _names(World)
            if name not in _IN_PARTS and getattr(self, name) != _WORLD_DEFAULTS.get(name, ...)
        }
        if "ledger" in made:
            made["ledger"] = dict(vars(self.ledger))
        if self.cause is not None:
            made["cause"] = self.cause.to_json()
        if self.consequences:
            made["consequences"] = [failure.to_json() for failure in self.consequences]
        return made

    def parts(self) -> dict[str, Json]:
        """The list of nodes in parts, by key; of a world that lists all of its nodes."""
        parts: dict[str, Json] = {
            _key(index): {
                "generation": self.generation,
                "digest": self.digest,
                "heirs": self.heirs,
                "nodes": [],
                "handing_over": [],
            }
            for index in range(self.shards)
        }
        for node in self.nodes:
            parts[part_key(node.node, self.shards)]["nodes"].append(node)
        for gone in self.handing_over:
            parts[part_key(gone, self.shards)]["handing_over"].append(gone)
        return parts

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> World:
        """Read a world made by `to_json` or, without nodes, by `summary`."""
        made = _known(cls, data)
        for name in made.keys() & _FROM_JSON.keys():
            made[name] = _FROM_JSON[name](made[name])
        return _made(cls, made)

    @classmethod
    def from_parts(cls, summary: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> World:
        """The world of a summary, with the nodes of these parts.

        Parts of another world, left over from a longer list, are ignored.
        """
        world = cls.from_json(summary)
        return world.with_parts([part for part in parts if world.owns(part)])

    def with_list_of(self, other: World) -> World:
        """The same world with the nodes that another phase of it has."""
        return replace(
            self,
            nodes=other.nodes,
            handing_over=other.handing_over,
            heirs=other.heirs,
        )

    def with_parts(self, parts: Sequence[Mapping[str, Any]]) -> World:
        """The same world with the nodes of these parts of it."""
        nodes = [WorldNode.from_json(node) for part in parts for node in part["nodes"]]
        return replace(
            self,
            nodes=tuple(sorted(nodes, key=_by_rank)),
            handing_over=tuple([node for part in parts for node in part["handing_over"]]),
            heirs=parts[0]["heirs"] if parts else {},
        )

    def has_list_of(self, other: World) -> bool:
        """Return whether every node has the same place there: another phase of the same
        generation."""
        return (self.generation, self.digest) == (other.generation, other.digest)

    def owns(self, part: Mapping[str, Any]) -> bool:
        """Return whether a part belongs to this world's list."""
        return (part["generation"], part["digest"]) == (self.generation, self.digest)


def addresses_in(parts: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The nodes of these parts, and the addresses of their agents: of thousands of places, only
    what is needed is made."""
    return {place[_NODE]: place[_PEER] for part in parts for place in part["nodes"]}


def _failures(items: Iterable[Json]) -> tuple[Failure, ...]:
    return tuple(Failure.from_json(item) for item in items)


_WORLD_DEFAULTS = _defaults(World)
#: Fields of a world that are stored apart from its summary.
_IN_PARTS = frozenset({"nodes", "handing_over", "heirs"})
#: The fields of a world that JSON gives otherwise than they are kept.
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "nodes": lambda items: tuple(WorldNode.from_json(item) for item in items),
    "handing_over": tuple,
    "ledger": lambda data: RestartLedger(**_known(RestartLedger, data)),
    "base": Base.from_json,
    "cause": Failure.from_json,
    "consequences": _failures,
    "spares": tuple,
    "missing": tuple,
    "held": lambda items: tuple(HeldOut.from_json(item) for item in items),
}


def _spread(nodes: Sequence[WorldNode]) -> list[WorldNode]:
    """A few nodes from all over the list, in order: neighbours in it often share a rack."""
    if len(nodes) <= CANDIDATES:
        return list(nodes)
    return [nodes[index * len(nodes) // CANDIDATES] for index in range(CANDIDATES)]


def shards_for(count: int) -> int:
    """The number of parts for a list of this many nodes: a power of two, 8 to 16 nodes in each.

    >>> [shards_for(count) for count in (1, 16, 17, 32, 1024, 4096)]
    [1, 1, 2, 2, 64, 256]
    """
    shards = 1
    while shards * PART_NODES < count:
        shards *= 2
    return shards


def part_key(node: str, shards: int) -> str:
    """The key of the part that a node's place is in, if it has one."""
    return _key(zlib.crc32(node.encode()) % shards)


def _key(index: int) -> str:
    # Of one length, so that no key is the beginning of another: reading `part/1` reads one part.
    return f"{PART_PREFIX}{index:05d}"


def _digest(nodes: Sequence[WorldNode], handing_over: Sequence[str]) -> str:
    """A digest that identifies a list of places; empty for an empty one."""
    if not nodes and not handing_over:
        return ""
    lines = [f"{node.node} {node.first_rank} {node.local_ranks}" for node in nodes]
    return hashlib.blake2s("\n".join((*lines, *handing_over)).encode(), digest_size=12).hexdigest()


def _made(cls: type[T], values: Json) -> T:
    """Make a record like the constructor, without setting each of its many fields separately:
    thousands are read when a world changes."""
    record: type = cls
    if missing := _required(record) - values.keys():
        raise TypeError(f"A {record.__name__} lacks {', '.join(sorted(missing))}.")
    made = object.__new__(cls)
    vars(made).update(_defaults(record))
    vars(made).update(values)
    return made


@cache
def _required(cls: type) -> frozenset[str]:
    return frozenset(_names(cls).keys() - _defaults(cls).keys())


@cache
def _names(cls: type) -> dict[str, None]:
    return dict.fromkeys(item.name for item in dataclasses.fields(cls))


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `data` that `cls` knows: a newer peer may send more."""
    names = _names(cls)
    return {key: value for key, value in data.items() if key in names}
