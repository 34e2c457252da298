"""Pairs of nodes whose workers cannot talk to each other. Pure.

Agents may use one network while their workers need another one, or ports that a firewall blocks.
Then a world begins, its workers fail to connect, and the agents see nothing wrong; or it has begun,
and the network between two of its nodes fails. The workers' errors show which pairs failed: gloo
and TCPStore name the address they tried, `train` names the rank. If only one side of a pair is
named, it is half a pair.

A pair does not show which of the two is to blame. The node with the most pairs is, counting also
those that agents suspect (`doubts`) and those of earlier worlds (`HeldOut.other`); of equals, the
newest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World, WorldNode

#: Errors of connections that were never made.
_NEVER_MADE = re.compile(
    r"connectfullmesh failed|connect timeout|timed out connecting|failed to connect|"
    r"timed out after \d+ms while trying to connect|no answer from (ranks? \d+|\S+:\d+)",
    re.IGNORECASE,
)
#: Said of connections that were made, too.
_NO_ANSWER = re.compile(r"no answer from (ranks? \d+|\S+:\d+)")
#: Said of connections between workers, whatever the address: a script has servers of its own.
_BETWEEN_WORKERS = re.compile(r"gloo|client socket|tcpstore|no answer from", re.IGNORECASE)
#: The other side, by rank or by address.
_RANK = re.compile(r"no answer from ranks? (\d+)")
_ADDRESSES = re.compile(
    r"remote=\[(?P<remote>[^\]]+)\]"
    r"|(?:to|of|from) \(?(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[\w.:%-]+?))(?::| )[\d(,]"
)


class Unconnected(NamedTuple):
    """Two nodes, or one if the other side is not known."""

    node: WorldNode
    other: WorldNode | None = None

    def words(self) -> str:
        if self.other is None:
            return f"workers of {self.node.name} cannot connect to some other nodes"
        return f"workers of {self.node.name} cannot connect to {self.other.name}"


def pairs(world: World, failures: Iterable[Failure]) -> list[Unconnected]:
    """The pairs that the failures of a generation name, each once."""
    named = {node.name: node for node in world.nodes}
    found: dict[frozenset[str], Unconnected] = {}
    for failure in failures:
        node = named.get(failure.node)
        if node is None or not is_unconnected(failure):
            continue
        other = _other(world, failure)
        if other is not None and other.node != node.node:
            found.setdefault(frozenset((node.node, other.node)), Unconnected(node, other))
        elif _BETWEEN_WORKERS.search(failure.message):
            found.setdefault(frozenset((node.node,)), Unconnected(node))
    return list(found.values())


def is_unconnected(failure: Failure) -> bool:
    """Return whether a worker reports that a connection could not be made."""
    return _NEVER_MADE.search(failure.message) is not None


def got_no_answer(failure: Failure) -> bool:
    """Return whether a worker reports that another one does not answer, connected or not."""
    return _NO_ANSWER.search(failure.message) is not None


def _other(world: World, failure: Failure) -> WorldNode | None:
    if rank := _RANK.search(failure.message):
        return next((node for node in world.nodes if int(rank[1]) in _ranks(node)), None)
    for match in _ADDRESSES.finditer(failure.message):
        address = match["remote"] or match["bracketed"] or match["plain"]
        for node in world.nodes:
            if address in (node.addr, node.peer.rpartition(":")[0].strip("[]")):
                return node
    return None


def _ranks(node: WorldNode) -> range:
    return range(node.first_rank, node.first_rank + node.nproc)


def worst(
    found: Sequence[Unconnected], known: Iterable[frozenset[str]] = ()
) -> tuple[WorldNode, str]:
    """The node to continue without: the one with the most pairs, including those otherwise `known`;
    of several, the newest. And another node that may be to blame as well; empty: none."""
    every = {*known, *map(_sides, found)}
    counts = Counter(node for pair in every for node in pair)
    sides = [side for pair in found for side in (pair.node, pair.other) if side is not None]
    node = max(sides, key=lambda side: (counts[side.node], side.new, side.node_rank))
    rivals = {
        other
        for pair in every
        if node.node in pair
        for other in pair - {node.node}
        if counts[other] == counts[node.node]
    }
    return node, min(rivals, default="")


def _sides(pair: Unconnected) -> frozenset[str]:
    return frozenset(side.node for side in (pair.node, pair.other) if side is not None)
