"""Election of the next host, and the majority needed to continue when nodes are unreachable. Pure.

The host of a *term* serves the store and forms the worlds. Two things need a majority, so that the
halves of a split network never both continue:

    to become host     votes for a higher term, from nodes that have lost their host too; a voter
                       has stopped its workers before, and votes once in a term
    to form a world    the last world's nodes that have reported that their workers stopped, or
                       that have left; whichever host it is

The electorate is the last world's nodes and its host, even if the host is not in that world. A
world is *confirmed* once a majority of the electorate before it has confirmed it. Until then, that
electorate must agree to the next world as well: its nodes may not know of the newest one.

If the number of voters is even, storage can be one more voter: the *witness*. It has one vote in
each such electorate; the first node that claims the vote has it forever, for one term.

A voter never votes for a node that knows less than itself, so the new host has the newest world
that a majority can have confirmed. The old host, cut off, may have formed one more world that no
node has confirmed: its number is skipped.

Terms and generations share one counter. The first world of the host of term t has at least the
number t - 1, and a term is chosen beyond all numbers that earlier hosts can have used. So no number
is used twice, "newer" means "by a later host, or later by the same host", and a number identifies a
world. `docs/concepts/host-election.md` has the whole protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchelastic.records import replace

#: The vote that the node which starts a job claims from the witness before its first world. Whoever
#: starts the job again claims it instead: then the run has no world, and never gets one.
FIRST_VOTE = "first"
#: Seconds between the attempts of failover candidates, by their place in the world.
CANDIDACY_STAGGER = 0.25


@dataclass(frozen=True)
class Electorate:
    """Voters, a strict majority of which must agree; with two voters, the host alone is enough."""

    nodes: frozenset[str]
    host: str = ""
    #: The witness's vote (`vote_after`): one more voter if the number of nodes is even.
    witness: str = ""
    #: Whether the host that formed the next world has that vote.
    held: bool = False

    @property
    def voters(self) -> frozenset[str]:
        return self.nodes | {self.witness} if self.witness else self.nodes

    def agrees(self, votes: Collection[str]) -> bool:
        given = sum(voter in votes for voter in self.voters)
        if len(self.voters) == 2 and self.host in self.nodes and self.host in votes:
            return True
        return 2 * given > len(self.voters)


def electorate(nodes: Iterable[str], host: str, witness: str = "") -> Electorate:
    """The voters on the world after this one: its nodes, and its host, which may be a spare.

    A node that trains alone can step without any other node, and a majority without it (of two, the
    host) does not stop it. Such a host continues only after that node's lease has ended.
    """
    return Electorate(frozenset(filter(None, (*nodes, host))), host, witness)


def agreed(electorates: Iterable[Electorate], votes: Collection[str]) -> bool:
    """Return whether these votes are enough for all electorates."""
    return all(electorate.agrees(votes) for electorate in electorates)


def vote_after(generation: int) -> str:
    """The witness's vote in the electorate of a world.

    The vote is named after the world that is replaced, not after the one that is formed. Otherwise,
    if two hosts both replace generation g, one could claim the vote for g + 1 and the other the
    vote for g + 2, and both would continue.
    """
    return f"after-{generation}"


def may_tie(nodes: Iterable[str], host: str) -> bool:
    """Return whether these nodes and their host can be split into halves."""
    return len({*nodes, host}) % 2 == 0


def to_claim(electorates: Iterable[Electorate], votes: Collection[str]) -> tuple[str, ...] | None:
    """The witness's votes that are missing for a majority; None if they are not enough.

    The oldest first: other nodes may claim it too.
    """
    every = tuple(electorates)
    missing = tuple(each.witness for each in every if each.witness and not each.agrees(votes))
    return missing if agreed(every, {*votes, *missing}) else None


@dataclass(frozen=True)
class Roll:
    """The electorates that must agree to the world after the newest one that a node knows."""

    #: The number of that world; -1: none yet.
    generation: int = -1
    #: Its electorate. Before the first world: the endpoints, one node behind each.
    latest: Electorate = Electorate(frozenset())
    #: The electorates that had to agree to it, until it is confirmed.
    before: tuple[Electorate, ...] = ()

    @property
    def electorates(self) -> tuple[Electorate, ...]:
        return tuple(each for each in (*self.before, self.latest) if each.nodes)


def voters(roll: Roll) -> frozenset[str]:
    """All voters of a roll."""
    return frozenset().union(*(each.voters for each in roll.electorates))


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

    `held` are the witness's votes that this host has in its term.
    """
    vote = vote_after(generation) if witness else ""
    latest = electorate(nodes, host, vote)
    before = tuple(replace(each, held=each.witness in held) for each in roll.electorates)
    return Roll(generation, latest, before)


def confirmed(roll: Roll, accepted: Mapping[str, int], gone: Collection[str] = ()) -> Roll:
    """The roll, given the newest world that each node has confirmed, and the nodes that left.

    Once the world is confirmed, only its nodes have a vote. Any node can detect this: a node that
    has this world has it from its own host (`may_take_up`). A node with a newer world may never
    have had this one.
    """
    if not roll.before:
        return roll
    have = {node for node, generation in accepted.items() if generation == roll.generation}
    have |= {roll.latest.host, *gone}  # its host has it
    return replace(roll, before=()) if agreed(roll.before, have | _held(roll)) else roll


def confirms_itself(roll: Roll, gone: Collection[str] = ()) -> bool:
    """Return whether the world cannot make a step before it is confirmed.

    A step needs every node of the world. If these are a majority of the earlier electorate, no step
    is possible before that majority has the world; otherwise the world must be confirmed before it
    starts.
    """
    nodes = {roll.latest.host, *roll.latest.nodes, *gone}
    return agreed(roll.before, nodes | _held(roll))


def _held(roll: Roll) -> set[str]:
    """The witness's votes that only the host of the newest world can have."""
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
    """A request for a vote: first whether the node would get it (not binding), then for the
    vote."""

    term: int
    node: str
    #: The newest world it has.
    generation: int
    #: Whether it requests the vote itself, not only a forecast.
    binding: bool
    #: Whether it knows that this world is confirmed; its voters then know it as well.
    confirmed: bool = False


@dataclass(frozen=True)
class Elector:
    """A node as a voter."""

    node: str
    #: The newest term in which it has voted, or followed a host.
    term: int = 0
    #: The node it has voted for, or followed, in that term.
    chosen: str = ""
    #: The newest world it has.
    generation: int = -1
    #: Whether it has a host that answers.
    has_host: bool = False
    #: Whether it has announced to a host that it leaves.
    leaving: bool = False
    #: Whether it was host and leaves: it votes once more. The node that gets that vote may rely on
    #: it, as a host relies on the consent of nodes that announced to it that they leave.
    hands_over: bool = False


def next_term(elector: Elector, heard: int = 0) -> int:
    """The term in which a node asks for votes, given the highest one it has heard of.

    The old host may have formed one world that this node does not know, but not two: a host forms
    no world until a majority has confirmed the one before. The first world of the new term, number
    `term - 1`, must come after that unknown one.
    """
    unknown = elector.generation + 1 if elector.generation >= 0 else -1
    return max(elector.term + 1, heard + 1, unknown + 2)


def refusal(elector: Elector, asked: Candidacy) -> str:
    """Return why a node does not vote for another; empty if it does."""
    if elector.has_host:
        return "its host answers"
    if elector.leaving:
        # The host that it announced it to relies on that for every decision without this node.
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

    It may not follow an earlier term than it has voted in: the node that got its vote may be host
    by now.
    """
    return not elector.has_host and term >= elector.term


def following(elector: Elector, term: int, host: str) -> Elector:
    return replace(elector, term=term, chosen=host, has_host=True)


def may_take_up(elector: Elector, generation: int) -> bool:
    """Return whether a node confirms a world that its host shows: a newer one, formed by that host.

    A world that the host itself took over is not confirmed: a host between the two may have formed
    a newer one, and a node that has that one would still get votes.
    """
    return generation > elector.generation and generation >= first_generation(elector.term)


def must_step_down(own_term: int, term: int) -> bool:
    """Return whether a host that hears of a term must stop being host.

    It may hear of it from another host, or from a node that would follow but has voted in a later
    term: that node could never follow this host, and the others would wait for it forever.
    """
    return term > own_term


def turn(order: Sequence[str], node: str, host: str) -> float:
    """Seconds to let other candidates try first: the nodes before this one in the world, without
    the host."""
    before = [other for other in order if other != host]
    return CANDIDACY_STAGGER * (before.index(node) if node in before else len(before))


# --- as JSON -------------------------------------------------------------------------------------


def to_json(roll: Roll) -> dict[str, Any]:
    """The fields of a roll that are not in the world itself."""
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
    """The roll of a world from its stored fields; without `before` if they belong to another
    world."""
    before: tuple[Electorate, ...] = ()
    if data is not None and data["generation"] == generation:
        before = tuple(
            Electorate(**{**each, "nodes": frozenset(each["nodes"])}) for each in data["before"]
        )
    return replace(formed(Roll(), generation, nodes, host, witness=witness), before=before)
