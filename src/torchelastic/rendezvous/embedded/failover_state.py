"""The state a node keeps so that the store survives its host."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torchelastic.records import replace
from torchelastic.rendezvous.embedded.ask_peers import Ballot
from torchelastic.rendezvous.embedded.table import Table
from torchelastic.rendezvous.leader import CONFIRMED_KEY
from torchelastic.rendezvous.majority import Candidacy, Elector, Roll
from torchelastic.rendezvous.store import Json
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
        """Whether its world is known to be confirmed; without `rows` electorates are unknown."""
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
