"""What a node without a host makes of the answers it has got. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import Returns
from torchelastic.rendezvous.embedded.failover_state import Holding
from torchelastic.rendezvous.majority import Elector, Electorate, Roll

#: The newest world of a node that is no more.
DEAD = -2
#: How often the time to let others try first doubles.
MOST_DOUBLINGS = 4
#: Seconds between two rounds of asking; they grow.
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
#: That of the witness: none.
WITNESS = -3


@dataclass(frozen=True)
class WitnessView:
    """The votes of the witness that a candidate has in its term, and those it cannot have."""

    claimed: Set[str] = frozenset()
    refused: Set[str] = frozenset()
    #: Why it is of no help, for people.
    obstacle: str = ""


@dataclass(frozen=True)
class Poll:
    """Who asks, and what it knows. Before the first world the endpoints vote, each for a node."""

    elector: Elector
    holding: Holding
    #: The endpoints, and the one that is this node's.
    places: tuple[str, ...]
    own_place: str = ""
    two_node_takeover: bool = False
    witness: WitnessView = WitnessView()

    @property
    def has_world(self) -> bool:
        return self.holding.roll.generation >= 0

    @property
    def is_in_world(self) -> bool:
        """Whether this node trained in the last world, for sure: its host may not have."""
        latest = self.holding.roll.latest
        return self.elector.node in latest.nodes - {latest.host}

    @property
    def roll(self) -> Roll:
        """Who must agree that this node be host."""
        if self.has_world:
            return self.holding.roll
        return Roll(latest=Electorate(frozenset(self.places)))

    @property
    def voice(self) -> str:
        """As whom this node votes itself."""
        return self.elector.node if self.has_world else self.own_place

    def turn(self, in_vain: int = 0) -> float:
        """Seconds to let others try first; more, the more often this node has stood in vain: with
        slow answers, those who stand a little later than others still stand at the same time."""
        order, host = self.places, ""
        if self.has_world:
            order, host = self.holding.order, self.holding.roll.latest.host
        return majority.turn(order, self.voice, host) * (1 << min(in_vain, MOST_DOUBLINGS))

    def suffices(self, returns: Returns) -> bool:
        """Whether nobody else need be asked."""
        named = any(ballot.hosts for ballot in returns.ballots.values())
        return named or self.is_won(returns)

    def is_won(self, returns: Returns) -> bool:
        """Whether this node is, or would be, elected."""
        return self.to_claim(returns) == ()

    def to_claim(self, returns: Returns) -> tuple[str, ...] | None:
        """The votes of the witness with which it would be elected; None: it would not be."""
        if self.has_world and not self.holding.rows:
            return None  # nothing to host the store with
        votes = self.votes(returns)
        electorates = majority.settled(self.roll, votes).electorates
        missing = majority.to_claim(electorates, votes)
        return None if missing is None or self.witness.refused & set(missing) else missing

    def votes(self, returns: Returns) -> dict[str, int]:
        """Who agrees, and the newest world that each of them has."""
        votes = {
            # Of a node, not of who sits in its place now: that one may know less.
            each.node if self.has_world else key: each.generation
            for key, each in returns.ballots.items()
            if each.granted
        }
        votes[self.voice] = self.elector.generation
        votes |= dict.fromkeys(self.witness.claimed, WITNESS)
        if self.two_node_takeover:
            votes |= dict.fromkeys(filter(self._is_other_of_two, self._dead_in(returns)), DEAD)
        return votes

    def _dead_in(self, returns: Returns) -> set[str]:
        """Who seems to be no more: nobody listens at its port, or another agent does."""
        return returns.refused | self._replaced_in(returns)

    def _replaced_in(self, returns: Returns) -> set[str]:
        """In whose place another agent answers."""
        return {
            key
            for key, ballot in returns.ballots.items()
            if ballot.node not in (key, self.elector.node)
        }

    def is_outdated(self, returns: Returns, *, waited: bool) -> bool:
        """Whether the job of this node's world has ended, and been started again without it.

        Too many of its nodes have other agents in their places for a majority ever to agree; or a
        host answers that this node cannot follow, and others have had the time to elect another.
        """
        electorates = self.roll.electorates
        there = frozenset().union(*(each.voters for each in electorates))
        there -= self._replaced_in(returns)
        named = [ballot for ballot in returns.ballots.values() if ballot.hosts]
        # A host of an earlier term than this node has voted in yields to it: others elect anew.
        has_other_host = bool(named) and not any(
            self._knows_more(ballot.term, ballot.generation) for ballot in named
        )
        is_hopeless = not majority.agreed(electorates, there)
        return self.has_world and (is_hopeless or (has_other_host and waited))

    def _is_other_of_two(self, node: str) -> bool:
        latest = self.roll.latest.nodes
        return self.has_world and len(latest) == 2 and node in latest

    def hosts(self, returns: Returns, *, waited: bool = False) -> list[str]:
        """Where a host is said to be, of the latest term first.

        Who has voted in a later term may not follow it; but it yields to who says hello, and may
        not know where this node is. So that is done where others had a lease's time to elect.
        """
        ballots = sorted(returns.ballots.values(), key=lambda ballot: -ballot.term)
        named = [
            address
            for ballot in ballots
            if self.may_follow(ballot.term, ballot.generation)
            or (waited and self._knows_more(ballot.term, ballot.generation))
            for address in ballot.hosts
        ]
        return list(dict.fromkeys(named))

    def may_follow(self, term: int, generation: int) -> bool:
        """Not who knows less than this node, and may never know more: a store that was started
        anew, say, at the endpoint of a host that is gone."""
        knows_more = self._knows_more(term, generation)
        return knows_more and majority.may_follow(self.elector, term)

    def _knows_more(self, term: int, generation: int) -> bool:
        """Whether the host of a term does, or will when it forms its first world."""
        ours = self.elector.generation
        return generation >= ours or majority.first_generation(term) > ours

    def predicament(self, returns: Returns) -> str:
        """What a node waits for that has no host and no majority, for people."""
        gone = "the rendezvous host is unreachable"
        if obstacle := self.witness.obstacle:
            return f"{gone}: {obstacle}" if self.has_world else obstacle
        if self.has_world and not self.holding.rows:
            return f"{gone}: waiting for a node that can take over as host"
        votes = set(self.votes(returns))
        wanted = max(self.roll.electorates, key=lambda each: len(each.nodes - votes))
        what = "nodes" if self.has_world else "endpoints"
        there = f"{len(wanted.nodes & votes)} of {len(wanted.nodes)} {what}"
        hint = ""
        if self.has_world and len(wanted.nodes) == 2 and not wanted.witness:
            hint = (
                "; if the host is gone for good, --two-node-takeover lets the other node "
                "continue; with --witness (a directory that all nodes share) the job survives "
                "the loss of either node"
            )
        elif wanted.witness in self.witness.refused:
            hint = ", and the witness voted for them"
        return f"{gone}, and {there} are not a majority: waiting for the others{hint}"


class Search:
    """How a node that looks for a host goes on: in which term it asks, how soon, and when it is its
    turn to stand for election."""

    def __init__(self, now: float) -> None:
        self.begun = self._tried = now
        #: Seconds until it asks again.
        self.pause = FIRST_PAUSE
        #: The latest term that somebody knows of: who has voted in a term refuses it to all others.
        self.heard = 0
        self._in_vain = 0

    def hear(self, returns: Returns) -> None:
        self.heard = max(self.heard, returns.latest_term)

    def is_our_turn(self, poll: Poll, term: int, now: float) -> bool:
        """Whether a node that has asked for the votes of a term stands for election.

        Not if it has voted in that term itself meanwhile: the node it voted for may be host by now,
        and would yield to a later term as soon as it heard of it.
        """
        voted = poll.elector.term >= term and poll.elector.chosen != poll.elector.node
        return not voted and now - self._tried >= poll.turn(self._in_vain)

    def stood_in_vain(self, now: float) -> None:
        """Others stood at the same time, and would again: let those before this node try first."""
        self.pause, self._tried = FIRST_PAUSE, now
        self._in_vain += 1

    def next_pause(self) -> float:
        pause, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
        return pause
