"""The state a node keeps so that the store survives its host."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torchelastic.records import replace
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import Ballot
from torchelastic.rendezvous.embedded.table import Table
from torchelastic.rendezvous.leader import CONFIRMED_KEY, ROLL_KEY
from torchelastic.rendezvous.majority import Candidacy, Elector, Roll
from torchelastic.rendezvous.store import Json, Store
from torchelastic.rendezvous.world import PART_PREFIX, WORLD_KEY, World, addresses_in
from torchelastic.transport import frames
from torchelastic.transport.frames import Row


@dataclass(frozen=True)
class FailoverState:
    """A node's knowledge of the newest world: enough to vote and, with `rows`, to host the
    store."""

    roll: Roll = field(default_factory=Roll)
    #: The failover candidates, in order.
    order: tuple[str, ...] = ()
    #: The addresses of the nodes' listeners.
    addresses: Mapping[str, str] = field(default_factory=dict)
    #: The rows that a new host puts into its store first.
    rows: Mapping[str, Json] = field(default_factory=dict)

    @property
    def is_confirmed(self) -> bool:
        """Return whether its world is known to be confirmed; without `rows` electorates are
        unknown."""
        return bool(self.rows) and not self.roll.before

    def confirmed(self) -> FailoverState:
        """The same state for a confirmed world."""
        return replace(self, roll=replace(self.roll, before=())) if self.roll.before else self

    def told(self, asked: Candidacy) -> FailoverState:
        """A voter's state after a request: its world is confirmed if the candidate knows that.

        The voters are a majority of the world, and one of them is in every later majority. If only
        the new host knew, and were lost, the others would wait for nodes that have no vote.
        """
        knows = asked.confirmed and asked.generation == self.roll.generation
        return self.confirmed() if knows else self

    def following(self, last: FailoverState) -> FailoverState:
        """The same state with what was known before: that this world is confirmed, which its host
        may not know, and the addresses of voters that are not in it."""
        is_same = last.roll.generation == self.roll.generation
        held = self.confirmed() if is_same and last.is_confirmed else self
        asked = frozenset().union(*(each.nodes for each in held.roll.before))
        known = {node: at for node, at in last.addresses.items() if is_same or node in asked}
        return replace(held, addresses={**known, **held.addresses}) if known else held


@dataclass(frozen=True)
class LeasedRows:
    """This node's rows in the store under its lease; it takes them along to the next host."""

    seconds: float
    #: Returns them: what they say may change until the node votes.
    rows: Callable[[], Mapping[str, Json]] = dict
    lease: str = field(default_factory=lambda: secrets.token_hex(16))

    def ballot(
        self, elector: Elector, hosts: list[str], ended: Collection[str], refusal: str
    ) -> Ballot:
        """The answer to a request for this node's vote; a vote carries the node's rows."""
        granted = not refusal
        rows = [Row(key, json.dumps(value), 0, 0) for key, value in self.rows().items()]
        return Ballot(
            node=elector.node,
            granted=granted,
            why=refusal,
            term=elector.term,
            generation=elector.generation,
            hosts=hosts,
            lease=self.lease if granted and rows else "",
            seconds=self.seconds,
            rows=rows if granted else [],
            ended=sorted(ended),
        )


def table_of(holding: FailoverState, ballots: Iterable[Ballot], now: float) -> Table:
    """The table of a new host: the world, and the rows of its voters."""
    table = Table()
    rows = dict(holding.rows)
    if holding.is_confirmed:
        rows[CONFIRMED_KEY] = {"generation": holding.roll.generation}
    for key, value in rows.items():
        table.put(key, frames.encode_value(key, value))
    for ballot in ballots:
        if ballot.lease:
            table.open_lease(ballot.lease, ballot.seconds, now)
            for row in ballot.rows:
                table.put(row.key, row.text or "{}", lease=ballot.lease)
    return table


class Failover:
    """Collects what to hold of the newest world.

    Of a large world, only its failover candidates hold everything: the others do not need thousands
    of addresses. Of a small world, every node does, also a spare: it may be the only node left that
    has confirmed the world. It does not vote for a node with an older world, so then only the spare
    itself can become host.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._holding = FailoverState()
        self._digest = ""
        #: The newest world that is confirmed, as far as is known.
        self._confirmed = -1
        #: Set once this node has been a candidate.
        self.is_candidate = asyncio.Event()

    async def take(self, store: Store, world: World, summary: Json) -> FailoverState:
        """The state to hold of a world; fetches what its summary lacks, if needed."""
        parts: dict[str, Json] = {}
        roll: Json | None = None
        if self.lacks(world):
            listed, rolls = await asyncio.gather(store.get(PART_PREFIX), store.get(ROLL_KEY))
            parts = {k: item.value for k, item in listed.items.items() if world.owns(item.value)}
            roll = rolls.items[ROLL_KEY].value if ROLL_KEY in rolls.items else None
        return self.noted(world, summary, parts, roll)

    def lacks(self, world: World) -> bool:
        """Return whether this node has to hold the whole of a world, and does not know all of it
        yet."""
        return self._is_to_hold(world) and not self._knows(world)

    def _is_to_hold(self, world: World) -> bool:
        return self._node in world.candidates or world.part_count == 1

    def _knows(self, world: World) -> bool:
        return (world.generation, world.digest) == (self._holding.roll.generation, self._digest)

    def noted(
        self, world: World, summary: Json, parts: Mapping[str, Json], roll: Json | None
    ) -> FailoverState:
        """The state to hold of a world, with the parts and the roll of one that it `lacks`."""
        if self._knows(world):
            if self._holding.rows:
                rows = {**self._holding.rows, WORLD_KEY: summary}
                self._holding = replace(self._holding, rows=rows)
        elif self._is_to_hold(world):
            self.is_candidate.set()
            self._holding = self._whole(world, summary, parts, roll)
        else:
            self._holding = self._outline(world)
        self._digest = world.digest
        return self.confirmed(self._confirmed)

    def confirmed(self, generation: int) -> FailoverState:
        """The state to hold once a world is confirmed, which may be known before the world is."""
        self._confirmed = max(self._confirmed, generation)
        if self._holding.roll.generation == generation:
            self._holding = self._holding.confirmed()
        return self._holding

    def _outline(self, world: World) -> FailoverState:
        """The minimum: enough to vote, and to look for a host."""
        places = {node.node: node.peer for node in world.nodes}
        return FailoverState(
            roll=_roll(None, world, places),
            order=tuple(world.candidates),
            addresses=_known({**world.candidates, **places}),
        )

    def _whole(
        self, world: World, summary: Json, listed: Mapping[str, Json], roll: Json | None
    ) -> FailoverState:
        addresses = addresses_in(listed.values())
        if len(addresses) != world.count:
            return self._outline(world)  # a newer one is there already
        rows: dict[str, Json] = {WORLD_KEY: summary, **listed}
        if roll is not None:
            rows[ROLL_KEY] = roll
        return self._made(world, rows, addresses)

    def formed(self, world: World, beside: Mapping[str, Json]) -> FailoverState:
        """The state to hold of a world that this node forms; `beside` are its parts and its
        roll."""
        rows = {WORLD_KEY: world.summary(), **beside}
        parts = [value for key, value in beside.items() if key.startswith(PART_PREFIX)]
        self.is_candidate.set()
        self._holding = self._made(world, rows, addresses_in(parts))
        self._digest = world.digest
        return self._holding

    def _made(
        self, world: World, rows: Mapping[str, Json], addresses: Mapping[str, str]
    ) -> FailoverState:
        roll = rows.get(ROLL_KEY)
        return FailoverState(
            roll=_roll(roll, world, addresses),
            order=tuple(world.candidates),
            addresses=_known({**world.candidates, **addresses}),
            rows=rows,
        )


def _roll(stored: Json | None, world: World, nodes: Iterable[str]) -> Roll:
    return majority.from_json(
        stored, world.generation, nodes, world.host, witness=bool(world.witness)
    )


def _known(addresses: Mapping[str, str]) -> dict[str, str]:
    """The addresses, without nodes that cannot be reached."""
    return {node: peer for node, peer in addresses.items() if peer}
