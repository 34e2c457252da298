"""The state a node keeps so that the store survives its host."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchelastic.rendezvous.embedded.table import Table
from torchelastic.rendezvous.embedded.votes import Ballot
from torchelastic.rendezvous.majority import Elector, Roll
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
    #: Where the receptions of nodes are.
    addresses: Mapping[str, str] = field(default_factory=dict)
    #: What a new host puts into its store first.
    rows: Mapping[str, Json] = field(default_factory=dict)


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
    for key, value in holding.rows.items():
        table.put(key, frames.encode_value(key, value))
    for ballot in ballots:
        if ballot.lease:
            table.open_lease(ballot.lease, ballot.seconds, now)
            for row in ballot.rows:
                table.put(row.key, row.text or "{}", lease=ballot.lease)
    return table
