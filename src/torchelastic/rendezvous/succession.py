"""Who hosts the embedded store next, and who may go on when the nodes cannot all be reached. Pure.

The host of a *term* serves the store and forms the worlds. Two things need a majority, so that the
halves of a cut network never both go on:

    to become host     votes for a higher term, from those who have lost their host, too; a voter
                       has stopped its workers before, and votes once in a term
    to form a world    the last world's nodes, as far as they have said that their workers have
                       stopped, or said goodbye; whichever host it is

A majority of whom? Of the nodes of the last world; and until a majority of the nodes before that
have taken it up, it is not *settled*, and they must agree as well: they may know nothing of it.

A voter never votes for who knows less than itself, so the new host holds the newest world that a
majority can have taken up. The old host, cut off, may have formed one world more that nobody has
taken up: its number is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

#: Seconds between the attempts of those who could be the next host, by their place in the world.
STAGGER = 0.25


@dataclass(frozen=True)
class Electorate:
    """Nodes of which a strict majority must agree; of two, the host alone will do."""

    nodes: frozenset[str]
    host: str = ""

    def agrees(self, votes: Collection[str]) -> bool:
        given = sum(node in votes for node in self.nodes)
        return 2 * given > len(self.nodes) or self._is_tied_with_host(votes)

    def _is_tied_with_host(self, votes: Collection[str]) -> bool:
        return len(self.nodes) == 2 and self.host in self.nodes and self.host in votes


def agreed(electorates: Iterable[Electorate], votes: Collection[str]) -> bool:
    """Whether these votes are enough for all who must agree."""
    return all(electorate.agrees(votes) for electorate in electorates)


@dataclass(frozen=True)
class Roll:
    """Who must agree to what follows the newest world that a node holds."""

    #: Its number; -1: none yet.
    generation: int = -1
    #: Its nodes. Before the first world: the endpoints, of which each speaks for one node.
    latest: Electorate = Electorate(frozenset())
    #: Those who had to agree to it, until it is settled.
    before: tuple[Electorate, ...] = ()

    @property
    def electorates(self) -> tuple[Electorate, ...]:
        return (*self.before, self.latest)


def formed(roll: Roll, generation: int, nodes: Iterable[str], host: str) -> Roll:
    """The roll after the host has formed another world."""
    return Roll(generation, Electorate(frozenset(nodes), host), roll.electorates)


def settled(roll: Roll, accepted: Mapping[str, int], gone: Collection[str] = ()) -> Roll:
    """The roll, given the newest world that each node has taken up, and who said goodbye.

    Once settled, only those who are in the world have a say.
    """
    have = {node for node, generation in accepted.items() if generation >= roll.generation}
    return replace(roll, before=()) if agreed(roll.before, have | set(gone)) else roll


def settles_itself(roll: Roll, gone: Collection[str] = ()) -> bool:
    """Whether the world cannot make a step before it is settled.

    A step needs every node of the world. Where those are a majority of who had to agree, nobody
    can have stepped in it before that majority had it; else it must be settled before it begins.
    """
    return agreed(roll.before, roll.latest.nodes | set(gone))


def next_generation(generation: int, *, same_host: bool) -> int:
    """The number of the world after this one: a new host leaves one out."""
    return generation + (1 if same_host else 2)


# --- voting --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidacy:
    """A node that would be host asks for a vote; first whether it would get it, then for it."""

    term: int
    node: str
    #: The newest world it holds.
    generation: int
    #: The vote itself, not only whether it would be given.
    binding: bool


@dataclass(frozen=True)
class Elector:
    """A node as a voter."""

    node: str
    #: The newest term it has voted in, or followed a host of.
    term: int = 0
    #: Whom it has voted for, or followed, in that term.
    chosen: str = ""
    #: The newest world it holds.
    generation: int = -1
    #: It has a host that answers.
    has_host: bool = False


def refusal(elector: Elector, asked: Candidacy) -> str:
    """Why a node does not vote for another; empty: it does."""
    if elector.has_host:
        return "its host answers"
    if asked.generation < elector.generation:
        return f"it knows generation {elector.generation}, a newer one"
    if asked.term < elector.term or (asked.term == elector.term and asked.node != elector.chosen):
        return f"it has voted in term {elector.term}"
    return ""


def voted(elector: Elector, asked: Candidacy) -> Elector:
    """The voter after a vote that was asked for and not refused."""
    return replace(elector, term=asked.term, chosen=asked.node) if asked.binding else elector


def may_follow(elector: Elector, term: int) -> bool:
    """Whether a node may have the host of a term for its own.

    Not that of an earlier term than it has voted in: whoever got that vote may be host by now.
    """
    return not elector.has_host and term >= elector.term


def following(elector: Elector, term: int, host: str) -> Elector:
    return replace(elector, term=term, chosen=host, has_host=True)


def must_yield(own_term: int, term: int) -> bool:
    """Whether a host that hears of another host is host no more."""
    return term > own_term


def turn(order: Sequence[str], node: str, host: str) -> float:
    """Seconds to let others try first: those before this node in the world, the old host aside."""
    before = [other for other in order if other != host]
    return STAGGER * (before.index(node) if node in before else len(before))
