"""Election of the next host, and the majority needed to continue when nodes are unreachable. Pure.

The host of a *term* serves the store and forms the worlds. Two things need a majority, so that the
halves of a split network never both continue:

    to become host     votes for a higher term, from nodes that have lost their host too; a voter
                       has stopped its workers before, and votes once in a term
    to form a world    the last world's nodes that have reported that their workers stopped, or
                       that have left; whichever host it is

The majority is that of the last world's nodes and its host, whether in it or not. Until a majority
of the electorate before that has taken it up, the world is not *settled*, and those must agree as
well: they may not know of it.

If the number of voters is even, storage can be one more voter: the *witness*. It has one vote in
each such electorate; the first node to claim it has it forever, and for one term.

A voter never votes for a node that knows less than itself, so the new host holds the newest world
that a majority can have taken up. The old host, cut off, may have formed one more world that no
node has taken up: its number is skipped.

Terms and generations are one count. The host of term t gives its first world the number t - 1 or a
higher one, and a term is chosen beyond all numbers that earlier hosts can have given. So no number
is given twice, "newer" means "of a later host, or later of the same", and a world can be identified
by its number alone. `docs/decisions/0010-succession.md` has the whole protocol, and what was
explored of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchelastic.records import replace

#: Seconds between the attempts of those who could be the next host, by their place in the world.
STAGGER = 0.25


@dataclass(frozen=True)
class Electorate:
    """Voters of which a strict majority must agree; of two, the host alone is enough."""

    nodes: frozenset[str]
    host: str = ""
    #: The vote of the witness, one more voter where the nodes are an even number (`vote_after`).
    witness: str = ""
    #: The host that formed the next world has that vote.
    held: bool = False

    @property
    def voters(self) -> frozenset[str]:
        return self.nodes | {self.witness} if self.witness else self.nodes

    def agrees(self, votes: Collection[str]) -> bool:
        given = sum(voter in votes for voter in self.voters)
        return 2 * given > len(self.voters) or self._is_tied_with_host(votes)

    def _is_tied_with_host(self, votes: Collection[str]) -> bool:
        return len(self.voters) == 2 and self.host in self.nodes and self.host in votes


def electorate(nodes: Iterable[str], host: str, witness: str = "") -> Electorate:
    """The voters on what follows a world: its nodes, and its host, which may be a spare.

    A node that trains alone needs nobody for a step, and a majority without it (of two, the host)
    does not stop it. Such a host continues only when that node's lease has ended.
    """
    return Electorate(frozenset(filter(None, (*nodes, host))), host, witness)


def agreed(electorates: Iterable[Electorate], votes: Collection[str]) -> bool:
    """Return whether these votes are enough for all electorates."""
    return all(electorate.agrees(votes) for electorate in electorates)


def vote_after(generation: int) -> str:
    """The vote of the witness in the electorate of a world.

    One for each world that is left behind, not for each that is formed: otherwise one of two hosts
    would claim the vote for generation g + 1, the other for g + 2, and both would have one.
    """
    return f"after-{generation}"


def may_tie(nodes: Iterable[str], host: str) -> bool:
    """Return whether these nodes and their host can be split into halves."""
    return len({*nodes, host}) % 2 == 0


def to_claim(electorates: Iterable[Electorate], votes: Collection[str]) -> tuple[str, ...] | None:
    """The witness's votes that are missing for a majority; None if they are not enough.

    The oldest first: others may claim it too.
    """
    every = tuple(electorates)
    missing = tuple(each.witness for each in every if each.witness and not each.agrees(votes))
    return missing if agreed(every, {*votes, *missing}) else None


@dataclass(frozen=True)
class Roll:
    """The electorates that must agree to what follows the newest world that a node holds."""

    #: Its number; -1: none yet.
    generation: int = -1
    #: Its nodes and its host. Before the first world: the endpoints, each of which speaks for one
    #: node.
    latest: Electorate = Electorate(frozenset())
    #: Those who had to agree to it, until it is settled.
    before: tuple[Electorate, ...] = ()

    @property
    def electorates(self) -> tuple[Electorate, ...]:
        return tuple(each for each in (*self.before, self.latest) if each.nodes)


def formed(
    roll: Roll,
    generation: int,
    nodes: Iterable[str],
    host: str,
    *,
    witness: bool = False,
    held: Collection[str] = (),
) -> Roll:
    """The roll after the host has formed another world, with or without a vote of the witness.

    `held` are the witness's votes that the host has in its term.
    """
    vote = vote_after(generation) if witness else ""
    latest = electorate(nodes, host, vote)
    before = tuple(replace(each, held=each.witness in held) for each in roll.electorates)
    return Roll(generation, latest, before)


def settled(roll: Roll, accepted: Mapping[str, int], gone: Collection[str] = ()) -> Roll:
    """The roll, given the newest world that each node has taken up, and the nodes that left.

    Once settled, only the nodes of the world have a vote. Any node may find that out: a node that
    has this world has it from its own host (`may_take_up`). A node with a newer one need not have
    had this.
    """
    if not roll.before:
        return roll
    have = {node for node, generation in accepted.items() if generation == roll.generation}
    have |= {roll.latest.host, *gone}  # by forming it, its host has taken it up
    return replace(roll, before=()) if agreed(roll.before, have | _held(roll)) else roll


def settles_itself(roll: Roll, gone: Collection[str] = ()) -> bool:
    """Return whether the world cannot make a step before it is settled.

    A step needs every node of the world. If these are a majority of the earlier electorate, nobody
    can have stepped in it before that majority had it; otherwise it must be settled before it
    begins.
    """
    nodes = {roll.latest.host, *roll.latest.nodes, *gone}
    return agreed(roll.before, nodes | _held(roll))


def _held(roll: Roll) -> set[str]:
    """The witness's votes that only the host which formed the world can ever have."""
    return {each.witness for each in roll.before if each.held}


def next_generation(generation: int, term: int) -> int:
    """The number of the world that the host of a term forms after this one."""
    return max(generation + 1, first_generation(term))


def first_generation(term: int) -> int:
    """The lowest number for a world of the host of a term; terms count from 1."""
    return term - 1


# --- voting --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidacy:
    """A node that wants to be host asks for a vote; first whether it would get it, then for it."""

    term: int
    node: str
    #: The newest world it holds.
    generation: int
    #: The vote itself, not only whether it would be given.
    binding: bool
    #: It knows that world to be settled; whoever votes for it knows from then on.
    settled: bool = False


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
    #: It has announced to a host that it leaves.
    leaving: bool = False
    #: It was host, and leaves: it votes once more. Whoever gets that vote counts on it from then
    #: on, as a host counts on those who have announced to it that they leave.
    hands_over: bool = False


def next_term(elector: Elector, heard: int = 0) -> int:
    """The term in which a node asks for votes, given the highest one it has heard of.

    It is beyond every number that the old host can have given to a world: one more than this node
    holds, because without a majority that holds one world, the host does not form the next.
    """
    left_out = elector.generation + 1 if elector.generation >= 0 else -1
    return max(elector.term + 1, heard + 1, left_out + 2)


def elected(roll: Roll, votes: Mapping[str, int]) -> bool:
    """Return whether a candidate with this roll is host; `votes`: the newest world of each voter.

    The electorate may have taken up the world without its host having lived to say so.
    """
    return agreed(settled(roll, votes).electorates, votes)


def refusal(elector: Elector, asked: Candidacy) -> str:
    """Return why a node does not vote for another; empty if it does."""
    if elector.has_host:
        return "its host answers"
    if elector.leaving:
        # The host it said so to counts on it for whatever it does without this node.
        return "it is leaving, and has agreed to what its last host does"
    if asked.generation < elector.generation:
        return f"it knows a newer generation, {elector.generation}"
    if asked.term < elector.term or (asked.term == elector.term and asked.node != elector.chosen):
        return f"it has already voted in term {elector.term}"
    return ""


def voted(elector: Elector, asked: Candidacy) -> Elector:
    """The voter after it has granted a vote."""
    if not asked.binding:
        return elector
    return replace(elector, term=asked.term, chosen=asked.node, leaving=elector.hands_over)


def may_follow(elector: Elector, term: int) -> bool:
    """Return whether a node may follow the host of a term.

    Not that of an earlier term than it has voted in: the node that got that vote may be host by
    now.
    """
    return not elector.has_host and term >= elector.term


def following(elector: Elector, term: int, host: str) -> Elector:
    return replace(elector, term=term, chosen=host, has_host=True)


def may_take_up(elector: Elector, generation: int) -> bool:
    """Return whether a node takes up a world that its host shows: a newer one, formed by that host.

    One that the host itself took over does not count as taken up: a host between the two may have
    formed a newer one, and a node that has that one would still get votes.
    """
    return generation > elector.generation and generation >= first_generation(elector.term)


def must_yield(own_term: int, term: int) -> bool:
    """Return whether a host that hears of a term must stop being host.

    From another host, or from a node that would follow but has voted in a later term: that node
    could never follow this host, and the others would wait for it forever.
    """
    return term > own_term


def turn(order: Sequence[str], node: str, host: str) -> float:
    """Seconds to let other candidates try first: the nodes before this one in the world, except the
    host."""
    before = [other for other in order if other != host]
    return STAGGER * (before.index(node) if node in before else len(before))


# --- as JSON -------------------------------------------------------------------------------------


def to_json(roll: Roll) -> dict[str, Any]:
    """The part of a roll that is not in the world itself."""
    before = [{**vars(each), "nodes": sorted(each.nodes)} for each in roll.before]
    return {"generation": roll.generation, "before": before}


def from_json(
    data: Mapping[str, Any] | None,
    generation: int,
    nodes: Iterable[str],
    host: str,
    *,
    witness: bool = False,
) -> Roll:
    """The roll of a world, with what was stored beside it; as if settled if that is of another
    world."""
    before: tuple[Electorate, ...] = ()
    if data is not None and data["generation"] == generation:
        before = tuple(
            Electorate(**{**each, "nodes": frozenset(each["nodes"])}) for each in data["before"]
        )
    return replace(formed(Roll(), generation, nodes, host, witness=witness), before=before)
