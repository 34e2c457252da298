"""Decide what a node without a host does with the answers of its peers. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import Returns
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.majority import Elector, Electorate, Roll

#: What a node without a world does while a node that has one looks for its host.
OTHERS_CONTINUE = (
    "this node does not start the job anew. It joins when the nodes of that generation have "
    "elected a host; to start the job anew, stop them"
)
#: Stands for the newest world of a dead node.
DEAD = -2
#: The limit on how often the time to let others try first doubles.
DOUBLINGS_LIMIT = 4
#: Seconds between two rounds of questions; they grow.
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
#: Stands for the newest world of the witness, which has none.
WITNESS = -3


@dataclass(frozen=True)
class WitnessView:
    """The witness's votes that a candidate has in its term, and those it was refused."""

    claimed: Set[str] = frozenset()
    refused: Set[str] = frozenset()
    #: Why the witness cannot help, for users.
    obstacle: str = ""


@dataclass(frozen=True)
class Poll:
    """The candidate and what it knows. Before the first world, each endpoint has a vote."""

    elector: Elector
    holding: FailoverState
    #: The endpoints, and this node's own.
    places: tuple[str, ...]
    own_place: str = ""
    two_node_takeover: bool = False
    witness: WitnessView = WitnessView()
    #: Nodes that saw the end of their run of the job, as far as other agents have said.
    ended: Set[str] = frozenset()
    #: A node that has a world has lost its host and asks for votes.
    gives_way: bool = False

    @property
    def has_world(self) -> bool:
        return self.holding.roll.generation >= 0

    @property
    def is_in_world(self) -> bool:
        """Return whether this node certainly trained in the last world; its host may not have."""
        latest = self.holding.roll.latest
        return self.elector.node in latest.nodes - {latest.host}

    @property
    def roll(self) -> Roll:
        """The voters that must agree for this node to become host."""
        if self.has_world:
            return self.holding.roll
        return Roll(latest=Electorate(frozenset(self.places)))

    @property
    def own_voter(self) -> str:
        """The voter that this node itself counts as."""
        return self.elector.node if self.has_world else self.own_place

    def turn(self, in_vain: int = 0) -> float:
        """Seconds to let other candidates try first; longer after each failed attempt, because with
        slow answers, nodes that run a little later than others would still run at the same time."""
        order, host = self.places, ""
        if self.has_world:
            order, host = self.holding.order, self.holding.roll.latest.host
        return majority.turn(order, self.own_voter, host) * (1 << min(in_vain, DOUBLINGS_LIMIT))

    def suffices(self, returns: Returns) -> bool:
        """Return whether no other peer needs to be asked."""
        named = any(ballot.hosts for ballot in returns.ballots.values())
        return named or self.is_won(returns)

    def is_won(self, returns: Returns) -> bool:
        """Return whether this node is, or would be, elected."""
        return self.to_claim(returns) == ()

    def to_claim(self, returns: Returns) -> tuple[str, ...] | None:
        """The witness's votes that would elect this node; None if they are not enough."""
        if self.has_world and not self.holding.rows:
            return None  # there is nothing to host the store from
        if self.gives_way and not self.has_world:
            return None  # that node's workers may have the only copy of the newest state
        votes = self.votes(returns)
        electorates = majority.confirmed(self.roll, votes).electorates
        missing = majority.to_claim(electorates, votes)
        return None if missing is None or self.witness.refused & set(missing) else missing

    def found(self, returns: Returns) -> FailoverState:
        """This node's failover state, confirmed if these answers show that it is."""
        is_confirmed = not majority.confirmed(self.roll, self.votes(returns)).before
        return self.holding.confirmed() if is_confirmed else self.holding

    def votes(self, returns: Returns) -> dict[str, int]:
        """The voters that agree, each with the newest world it has."""
        votes = {
            # The answer must come from that node, not from another agent at its address, which may
            # know less.
            each.node if self.has_world else key: each.generation
            for key, each in returns.ballots.items()
            if each.granted
        }
        votes[self.own_voter] = self.elector.generation
        votes |= dict.fromkeys(self.witness.claimed, WITNESS)
        if self.two_node_takeover:
            # It seems dead: nothing listens at its port, or another agent does.
            gone = returns.refused | self._replaced_in(returns)
            votes |= dict.fromkeys(filter(self._is_other_of_two, gone), DEAD)
        return votes

    def dead(self, returns: Returns) -> frozenset[str]:
        """The dead nodes whose votes this node counts as its own (`--two-node-takeover`)."""
        return frozenset(node for node, last in self.votes(returns).items() if last == DEAD)

    def _replaced_in(self, returns: Returns) -> set[str]:
        """The nodes whose address another agent answers at."""
        return {
            key
            for key, ballot in returns.ballots.items()
            if ballot.node not in (key, self.elector.node)
        }

    @property
    def has_ended(self) -> bool:
        """Return whether a voter of this node's world saw the end of the job."""
        return self.has_world and bool(majority.voters(self.roll) & self.ended)

    def why_outdated(self, returns: Returns, *, waited: bool) -> str:
        """Return why the job of this node's world does not continue; empty if it may.

        Either it has ended; or it was started again without this node: other agents have replaced
        too many of its nodes for a majority, or a host answers that this node cannot follow, and
        the others had time to elect another one.
        """
        if self.has_ended:
            return "that run of the job has ended"
        electorates = self.roll.electorates
        there = majority.voters(self.roll) - self._replaced_in(returns)
        named = [ballot for ballot in returns.ballots.values() if ballot.hosts]
        # A host of an earlier term than this node's vote yields to it, and the others elect again.
        has_other_host = bool(named) and not any(
            self._knows_more(ballot.term, ballot.generation) for ballot in named
        )
        is_hopeless = not majority.agreed(electorates, there)
        is_outdated = self.has_world and (is_hopeless or (has_other_host and waited))
        return "the job has been restarted since" if is_outdated else ""

    def _is_other_of_two(self, node: str) -> bool:
        latest = self.roll.latest.nodes
        return self.has_world and len(latest) == 2 and node in latest

    def hosts(self, returns: Returns, *, waited: bool = False) -> list[str]:
        """The addresses of possible hosts, latest term first.

        A node that has voted in a later term may not follow a host; but that host yields when the
        node connects, and may not know this node's address. So such hosts are included once the
        others had a lease's time to elect.
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
        """Return whether this node may follow a host: not one that knows less and may never learn
        more, such as a store that was restarted at the endpoint of a lost host."""
        knows_more = self._knows_more(term, generation)
        return knows_more and majority.may_follow(self.elector, term)

    def _knows_more(self, term: int, generation: int) -> bool:
        """Return whether the host of a term knows more than this node, or will after its first
        world."""
        ours = self.elector.generation
        return generation >= ours or majority.first_generation(term) > ours

    def waiting_reason(self, returns: Returns) -> str:
        """The sentence for users that says what a node without a host waits for."""
        gone = "the rendezvous host is unreachable"
        if self.gives_way and not self.has_world:
            return f"another node has a generation of this job: {OTHERS_CONTINUE}"
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
        if forgot := len(wanted.nodes & self._replaced_in(returns)) if self.has_world else 0:
            hint += f" ({forgot} of them restarted without its vote: its voter file is lost)"
        return f"{gone}, and {there} are not a majority: waiting for the others{hint}"


class Search:
    """The search of a node for a host: the term in which it asks, how often, and when it runs for
    election."""

    def __init__(self, now: float) -> None:
        self.begun = self._tried = now
        #: Seconds until the next round of questions.
        self.pause = FIRST_PAUSE
        #: The latest term that any peer knows: a voter gives its vote in a term only once.
        self.heard = 0
        self._in_vain = 0

    def hear(self, returns: Returns) -> None:
        self.heard = max(self.heard, returns.latest_term)

    def is_our_turn(self, poll: Poll, term: int, now: float) -> bool:
        """Return whether a node that has asked for the votes of a term runs for election.

        It does not if it has voted in that term meanwhile: the node it voted for may be host by
        now, and would yield to a later term.
        """
        voted = poll.elector.term >= term and poll.elector.chosen != poll.elector.node
        return not voted and now - self._tried >= poll.turn(self._in_vain)

    def lost_election(self, now: float) -> None:
        """After a lost election, let the nodes before this one try first, so that rivals do not run
        again at the same time."""
        self.pause, self._tried = FIRST_PAUSE, now
        self._in_vain += 1

    def next_pause(self) -> float:
        pause, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
        return pause
