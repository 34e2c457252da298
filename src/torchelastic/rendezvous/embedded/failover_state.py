"""The state a node keeps so that the store survives its host."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchelastic.records import replace
from torchelastic.rendezvous.embedded.table import Table
from torchelastic.rendezvous.embedded.votes import Ballot
from torchelastic.rendezvous.leader import SETTLED_KEY
from torchelastic.rendezvous.majority import Candidacy, Elector, Roll
from torchelastic.rendezvous.store import Json
from torchelastic.transport import frames
from torchelastic.transport.frames import Row


@dataclass(frozen=True)
class Holding:
    """A node's knowledge of the newest world: enough to vote and, with `rows`, to host the
    store."""

    roll: Roll = field(default_factory=Roll)
    #: Who could be host next, in order.
    order: tuple[str, ...] = ()
    #: The addresses of the nodes' listeners.
    addresses: Mapping[str, str] = field(default_factory=dict)
    #: What a new host puts into its store first.
    rows: Mapping[str, Json] = field(default_factory=dict)

    @property
    def is_settled(self) -> bool:
        """Whether its world is known to be; without `rows`, who agreed to it is not known."""
        return bool(self.rows) and not self.roll.before

    def settled(self) -> Holding:
        """The same, of a world that is settled."""
        return replace(self, roll=replace(self.roll, before=())) if self.roll.before else self

    def told(self, asked: Candidacy) -> Holding:
        """What a voter holds once it has been asked: as settled, if who asks knows that.

        Those who vote are a majority of the world, and one of them is in every later majority. If
        only the new host knew, and were lost, the others would wait for nodes without a say.
        """
        knows = asked.settled and asked.generation == self.roll.generation
        return self.settled() if knows else self

    def following(self, last: Holding) -> Holding:
        """The same, with what was known before: that this world is settled, though its host need
        not know it; where those are who must agree to what follows, and are not in it."""
        is_same = last.roll.generation == self.roll.generation
        held = self.settled() if is_same and last.is_settled else self
        asked = frozenset().union(*(each.nodes for each in held.roll.before))
        known = {node: at for node, at in last.addresses.items() if is_same or node in asked}
        return replace(held, addresses={**known, **held.addresses}) if known else held


@dataclass(frozen=True)
class LeasedRows:
    """This node's rows in the store under its lease; it takes them along to the next host."""

    seconds: float
    rows: Mapping[str, Json] = field(default_factory=dict)
    lease: str = field(default_factory=lambda: secrets.token_hex(16))

    def ballot(self, elector: Elector, hosts: list[str], *, why: str, granted: bool) -> Ballot:
        """The answer to a request for this node's vote; a vote carries what the node holds."""
        rows = [Row(key, json.dumps(value), 0, 0) for key, value in self.rows.items()]
        return Ballot(
            node=elector.node,
            granted=granted,
            why=why,
            term=elector.term,
            generation=elector.generation,
            hosts=hosts,
            lease=self.lease if granted and rows else "",
            seconds=self.seconds,
            rows=rows if granted else [],
        )


def table_of(holding: Holding, ballots: Iterable[Ballot], now: float) -> Table:
    """The lasting part of the lost store: the world, and the rows the voters had."""
    table = Table()
    rows = dict(holding.rows)
    if holding.is_settled:
        rows[SETTLED_KEY] = {"generation": holding.roll.generation}
    for key, value in rows.items():
        table.put(key, frames.encode_value(key, value))
    for ballot in ballots:
        if ballot.lease:
            table.open_lease(ballot.lease, ballot.seconds, now)
            for row in ballot.rows:
                table.put(row.key, row.text or "{}", lease=ballot.lease)
    return table
