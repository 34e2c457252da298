"""The records in the store: a node's member record, and the world the leader decided.

A world is stored in pieces, so that a change costs each node the same with thousands of nodes as
with two: a *summary* of constant size at one key, and the list of nodes in *parts*. A node's place
is in the part that its id hashes to; the node fetches that part, and holds a `World` that lists
only the nodes of its part, and totals for all. A reader that needs every node combines all parts.
The summary changes with every phase and is short; fields that change only with the list are in the
parts.
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
from torchelastic.rendezvous.held_out import HeldOut, HeldOutNodes
from torchelastic.rendezvous.restart_policy import Kind, RestartHistory
from torchelastic.rendezvous.state_check import Checked, Rewind

LEADER_KEY = "leader"
MEMBER_PREFIX = "member/"
WORLD_KEY = "world"
PART_PREFIX = "part/"
#: Of each node: the place in a replica that the leader has allotted to it.
PLACE_PREFIX = "place/"
#: About the number of nodes in a part; a world of up to this many has one part.
PART_NODES = 16
#: The most failover candidates of the embedded store that a world lists.
FAILOVER_CANDIDATES_LIMIT = 16
#: The most nodes that a message for users names.
LISTED_NAMES_LIMIT = 32

Json = dict[str, Any]
T = TypeVar("T")


class Base(NamedTuple):
    """The version that a generation with kept state started from: work of older generations beyond
    it is void. Nodes outside its world learn it from the leader."""

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
    #: Name for users: the host name, and a number if several agents share a host.
    name: str
    #: The address where other nodes reach this one.
    addr: str
    nproc: int
    role: str = "default"
    #: `host:port` of this agent's listener.
    peer: str = ""
    #: The node rank requested in a static rendezvous.
    node_rank: int | None = None
    #: The digest of its `JobSettings`.
    agreement: str = ""
    #: `host:port` of an unused store, offered for the next generation.
    store: str = ""
    #: The token that it reads from the witness; empty: it has no witness, or cannot reach it.
    witness: str = ""
    #: Whether workers could start at once; a newcomer joins no world before that.
    ready: bool = False
    #: Why this node cannot start workers before its machine is fixed; empty if it can.
    unfit: str = ""
    #: Neighbours whose connections ended, or that are silent: the leader asks them.
    doubts: tuple[str, ...] = ()
    #: Nodes of a generation that have not answered this one for a lease, and that generation.
    silent: tuple[str, ...] = ()
    silent_in: int = -1
    #: The last `World.probe` for which this node has probed the others, and those of them that it
    #: still cannot reach.
    probed: int = -1
    unreached: tuple[str, ...] = ()
    #: With etcd: the newest generation that this node knows to be over.
    stopping: int = -1
    #: The newest generation that this node has seen running.
    accepted: int = -1
    #: No worker of this or an older generation is left on this node.
    gone: int = -1
    #: The generation in which every worker of this node succeeded.
    done: int = -1
    #: The newest generation in which the program of a worker of this node has returned.
    returned: int = -1
    #: The highest step that a worker of this node has reported.
    step: int = -1
    #: The newest generation in which a worker of this node has taken a step.
    trained: int = -1
    #: The newest generation whose state is in memory on this node; -1: none.
    holds: int = -1
    #: The base of the newest generation whose workers have restored their kept state here.
    base: Base | None = None
    #: Failures on this node in the current generation, in order.
    failures: tuple[Failure, ...] = ()
    #: Its agent has just been restarted.
    resumed: bool = False
    #: The reason or signal of an announced leave; empty while the node stays.
    leaving: str = ""
    #: The workers are in-process: they outlive their generation (`torchelastic.train`). The fields
    #: below are about in-process workers.
    in_process: bool = False
    #: Local ranks of the workers that are in a world or could enter one.
    standing: tuple[int, ...] = ()
    #: The number of workers that are starting.
    starting: int = 0
    #: The generation whose workers are paused: they have reported the step they entered, and enter
    #: no other; and the largest of these steps.
    paused: int = -1
    entered: int = -1
    #: The generation in which a worker of this node has reached the end of its data, and the number
    #: of steps committed by then.
    finished: int = -1
    finished_after: int = -1
    #: The number of workers in the mesh that its workers made (`torchelastic.mesh`); 0: none.
    replica: int = 0
    #: The place of this node in its replica, if a replica spans nodes; -1: it has none yet.
    place: int = -1
    #: The last check of the states of this node's workers, and its generation.
    checked: tuple[Checked, ...] = ()
    checked_in: int = -1
    #: Of a sharded model: the local ranks of standing workers without the state that `holds` names.
    blank: tuple[int, ...] = ()

    def to_json(self) -> Json:
        """All fields that differ from their defaults: records are sent often, and few fields do."""
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
        for name in ("standing", "doubts", "silent", "unreached", "blank"):
            if name in made:
                made[name] = tuple(made[name])
        if "base" in made:
            made["base"] = Base.from_json(made["base"])
        if "checked" in made:
            made["checked"] = tuple(Checked(*one) for one in made["checked"])
        return _made(cls, made)


@cache
def _defaults(cls: type) -> Json:
    """The defaults of a record's fields; a field is sent only if it differs."""
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
    #: Its rank among the nodes.
    node_rank: int
    #: The number of its workers in the world.
    nproc: int
    role: str
    #: Global rank of its first worker; the others follow.
    first_rank: int
    first_role_rank: int
    #: The local ranks of its workers in the world; their global ranks follow this order.
    local_ranks: tuple[int, ...]
    #: `host:port` of its agent's listener.
    peer: str = ""
    #: It was not in the job's last world that trained.
    new: bool = False

    def has_rank(self, rank: int) -> bool:
        return self.first_rank <= rank < self.first_rank + self.nproc

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> WorldNode:
        """Read the JSON list, which needs no field names: every node receives many of them. A newer
        peer may append fields."""
        made = [*data[: len(cls._fields)]]
        made[_LOCAL_RANKS] = tuple(made[_LOCAL_RANKS])
        return cls(*made)


_LOCAL_RANKS = WorldNode._fields.index("local_ranks")
_NODE, _PEER = WorldNode._fields.index("node"), WorldNode._fields.index("peer")
_by_rank = itemgetter(WorldNode._fields.index("node_rank"))


@dataclass(frozen=True, kw_only=True)
class World:
    """The leader's decision: the generation, its nodes, and its phase.

    `nodes` may list only some of the nodes; `size`, `count` and `roles` are totals of all. Use
    `with_nodes` to change the list: it keeps them consistent.
    """

    generation: int
    #: The first node of the first world: it distinguishes this start of the job from others, whose
    #: generations also count from 0.
    start: str = ""
    #: `waiting` for nodes; `agreeing` (published, but it does not start before a majority has
    #: confirmed it); `running`; `pausing` (in-process workers report their step); `over` (workers
    #: are being stopped); `closed` (the job has ended).
    phase: Literal["waiting", "agreeing", "running", "pausing", "over", "closed"]
    #: The nodes whose places this holder knows, by rank.
    nodes: tuple[WorldNode, ...] = ()
    #: The number of workers, of nodes, and of workers of each role.
    size: int = 0
    count: int = 0
    roles: Mapping[str, int] = field(default_factory=dict)
    #: The number of parts that the list of nodes is stored in, and the digest of the list.
    part_count: int = 1
    digest: str = ""
    #: The failover candidates of the embedded store, in order, and their agents' addresses; its
    #: current host; and the host's term.
    candidates: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    term: int = 0
    #: The token of the witness if it has a vote on the next world.
    witness: str = ""
    #: `host:port` of the store made for this generation alone.
    store: str = ""
    #: The kind of its end, once it is over.
    ending: Kind | None = None
    #: The leaving node, if any, that writes the state of the last ended generation to storage
    #: before it goes: only one of them does.
    saver: str = ""
    #: The base of the newest generation, as far as members have reported it.
    base: Base | None = None
    #: Why the world is in this phase, in a sentence.
    reason: str = ""
    #: The restarts that the job has used, including this generation's.
    restarts: RestartHistory = field(default_factory=RestartHistory)
    #: The first failure of the last failed generation, and its consequences.
    cause: Failure | None = None
    consequences: tuple[Failure, ...] = ()
    #: Its workers are in-process: they enter the next world instead of being stopped.
    in_process: bool = False
    #: The step that the workers of the last generation run through before they enter this one or,
    #: in a world that is over, before they stop; None: they stop at once. If the training is done:
    #: its last step.
    after: int | None = None
    #: Nodes that are not in this generation, but run through that step too, as they were in the
    #: last one. Stored in parts, as the nodes are.
    handing_over: tuple[str, ...] = ()
    #: The first names, and the number, of members without a place, and of missing nodes of the last
    #: world.
    spares: tuple[str, ...] = ()
    spare_count: int = 0
    missing: tuple[str, ...] = ()
    missing_count: int = 0
    #: Nodes that have failed recently; some of them are held out of the next worlds.
    held: HeldOutNodes = ()
    #: An earlier world of the job has trained.
    proven: bool = False
    #: In phase waiting: the seconds until the job gives up, at the time of publication; None: it
    #: never does.
    patience: float | None = None
    #: In phase waiting: enough nodes have joined, but are not ready.
    enough: bool = False
    #: The exit code of every agent once the job is closed.
    exitcode: int = 0
    #: Counts up when nodes of a world cannot reach each other: all members then probe each other.
    #: 1 + the generation in which that happened last.
    probe: int = 0
    #: The number of workers in a replica: rank r is in replica r // replica, and its coordinate
    #: there is r % replica. 0: the model is not sharded.
    replica: int = 0
    #: The last step of this generation after which all states were equal; -1: none.
    certified: int = -1
    #: Why the workers do not compare their states any more; empty: they do if the script asks.
    unchecked: str = ""
    #: Where a state that differed made the job go back to last.
    rewind: Rewind | None = None
    #: Which worker was wrong, once steps taken again have shown it, in a sentence.
    blamed: str = ""
    #: Of a generation that it ended: the ranks whose states were wrong.
    wrong: tuple[int, ...] = ()

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
        """Return whether its workers run or are about to start."""
        return self.phase in ("agreeing", "running", "pausing")

    @property
    def has_ended(self) -> bool:
        """Return whether its workers must be gone: it is over, or was before the job started to
        wait for nodes.

        The world in which a new job waits has no nodes, and the number of the first real one.
        """
        return self.phase == "over" or (self.phase == "waiting" and self.count > 0)

    @property
    def goes_back(self) -> bool:
        """Return whether it is over because states differed."""
        return self.rewind is not None and self.rewind.generation == self.generation + 1

    def has_ended_for(self, node: str) -> bool:
        """Return whether the leader waits for a node to report that its workers are gone."""
        return self.has_ended and (self.phase == "over" or self.place(node) is not None)

    def steps_without(self, host: str) -> bool:
        """Return whether one node trains alone, without its host. It can step without any other
        node, so the host continues without it only after its lease has ended; a refused connection
        proves nothing."""
        return self.count == 1 and self.place(host) is None

    def role_size(self, role: str) -> int:
        """The number of workers with this role."""
        return self.roles.get(role, 0)

    # --- another one -----------------------------------------------------------------------------

    def without(self, node: str) -> World:
        """The world for a node that was dropped and has rejoined since its start: it is over."""
        if self.place(node) is None or self.phase not in ("running", "pausing"):
            return self
        reason = "the rendezvous dropped this node"
        return replace(self, phase="over", after=None, ending="node-failure", reason=reason)

    def with_nodes(self, nodes: Iterable[WorldNode], handing_over: Iterable[str] = ()) -> World:
        """The same world with these nodes, and its totals. The host stays a failover candidate: it
        has a vote, in the world or not."""
        nodes, handing_over = tuple(nodes), tuple(handing_over)
        host = {self.host: self.candidates[self.host]} if self.host in self.candidates else {}
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
            part_count=parts_for(len(nodes) + len(handing_over)),
            digest=_digest(nodes, handing_over),
            candidates={**{node.node: node.peer for node in _spread(nodes)}, **host},
        )

    def in_parts(self, most: int) -> World:
        """The same world in at most this many parts, of any size."""
        return replace(self, part_count=min(self.part_count, most))

    # --- as JSON ---------------------------------------------------------------------------------

    def to_json(self) -> Json:
        """The world, with the nodes that this holder knows."""
        return {
            **self.summary(),
            "nodes": list(self.nodes),
            "handing_over": list(self.handing_over),
            "candidates": dict(self.candidates),
        }

    def summary(self) -> Json:
        """Everything but the list of nodes: its size does not grow with them, and every node
        receives it in every phase. Default values are left out."""
        made = {
            name: getattr(self, name)
            for name in _names(World)
            if name not in _IN_PARTS and getattr(self, name) != _WORLD_DEFAULTS.get(name, ...)
        }
        if "restarts" in made:
            made["restarts"] = dict(vars(self.restarts))
        if self.cause is not None:
            made["cause"] = self.cause.to_json()
        if self.consequences:
            made["consequences"] = [failure.to_json() for failure in self.consequences]
        return made

    def parts(self) -> dict[str, Json]:
        """The list of nodes in parts, by key; the world must list all of its nodes."""
        parts: dict[str, Json] = {
            _key(index): {
                "generation": self.generation,
                "digest": self.digest,
                "candidates": self.candidates,
                "nodes": [],
                "handing_over": [],
            }
            for index in range(self.part_count)
        }
        for node in self.nodes:
            parts[part_key(node.node, self.part_count)]["nodes"].append(node)
        for gone in self.handing_over:
            parts[part_key(gone, self.part_count)]["handing_over"].append(gone)
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
        """The same world with the list of nodes of another of its phases."""
        return replace(
            self,
            nodes=other.nodes,
            handing_over=other.handing_over,
            candidates=other.candidates,
        )

    def with_parts(self, parts: Sequence[Mapping[str, Any]]) -> World:
        """The same world with the nodes of these parts of it."""
        nodes = [WorldNode.from_json(node) for part in parts for node in part["nodes"]]
        return replace(
            self,
            nodes=tuple(sorted(nodes, key=_by_rank)),
            handing_over=tuple([node for part in parts for node in part["handing_over"]]),
            candidates=parts[0]["candidates"] if parts else {},
        )

    def has_list_of(self, other: World) -> bool:
        """Return whether the other world has the same list: another phase of the same
        generation."""
        return (self.generation, self.digest) == (other.generation, other.digest)

    def owns(self, part: Mapping[str, Any]) -> bool:
        """Return whether a part belongs to this world's list."""
        return (part["generation"], part["digest"]) == (self.generation, self.digest)


def addresses_in(parts: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The nodes of these parts and their agents' addresses, without parsing thousands of places."""
    return {place[_NODE]: place[_PEER] for part in parts for place in part["nodes"]}


def _failures(items: Iterable[Json]) -> tuple[Failure, ...]:
    return tuple(Failure.from_json(item) for item in items)


_WORLD_DEFAULTS = _defaults(World)
#: Fields of a world that are stored apart from its summary.
_IN_PARTS = frozenset({"nodes", "handing_over", "candidates"})
#: Converters of the fields whose JSON form differs.
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "nodes": lambda items: tuple(WorldNode.from_json(item) for item in items),
    "handing_over": tuple,
    "restarts": lambda data: RestartHistory(**_known(RestartHistory, data)),
    "base": Base.from_json,
    "cause": Failure.from_json,
    "consequences": _failures,
    "rewind": lambda data: None if data is None else Rewind(*data),
    "wrong": tuple,
    "spares": tuple,
    "missing": tuple,
    "held": lambda items: tuple(HeldOut.from_json(item) for item in items),
}


def _spread(nodes: Sequence[WorldNode]) -> list[WorldNode]:
    """A few nodes from across the list, in order: neighbours often share a rack."""
    if len(nodes) <= FAILOVER_CANDIDATES_LIMIT:
        return list(nodes)
    return [
        nodes[index * len(nodes) // FAILOVER_CANDIDATES_LIMIT]
        for index in range(FAILOVER_CANDIDATES_LIMIT)
    ]


def parts_for(count: int) -> int:
    """The number of parts for a list of this many nodes: a power of two, 8 to 16 nodes in each.

    >>> [parts_for(count) for count in (1, 16, 17, 32, 1024, 4096)]
    [1, 1, 2, 2, 64, 256]
    """
    part_count = 1
    while part_count * PART_NODES < count:
        part_count *= 2
    return part_count


def part_key(node: str, part_count: int) -> str:
    """The key of the part for a node."""
    return _key(zlib.crc32(node.encode()) % part_count)


def _key(index: int) -> str:
    # All of one length, so that no key is a prefix of another: reading `part/1` reads one part.
    return f"{PART_PREFIX}{index:05d}"


def _digest(nodes: Sequence[WorldNode], handing_over: Sequence[str]) -> str:
    """The digest of a list of places; empty for an empty list."""
    if not nodes and not handing_over:
        return ""
    lines = [f"{node.node} {node.first_rank} {node.local_ranks}" for node in nodes]
    return hashlib.blake2s("\n".join((*lines, *handing_over)).encode(), digest_size=12).hexdigest()


def _made(cls: type[T], values: Json) -> T:
    """Make a record as the constructor does, but without setting its many fields one by one:
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
