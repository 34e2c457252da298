"""A model of embedded failover: every decision is made by `majority`, every order is possible.

What was said is never taken back: each message lies in a set of its own and may be heard at any
later time, several times, or never. That is loss, duplication, delay and reordering at once. A node
that is paused does nothing for a while, as any node may; its workers go on.

To keep the number of states down, things happen together that nobody can tell apart:
* a node that votes, asks for votes or finds another host has lost its host just before;
* a step is made as soon as all nodes of a world run it: that only helps to find a violation;
* what only ever makes more possible happens as soon as it can: a candidate counts its votes, its
  voters hear that it won, a host finds its world confirmed, and its followers hear that and begin.
  All conditions are monotone in what was heard, and whoever waits could do no more than then.
A crash is a pause without end, but for its workers; it is a move only where that matters. An agent
that restarts has no workers, no host, and of its memory what it had written down before it last
spoke. Nobody hears of a world, a vote or a host before the disk has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain, combinations
from typing import NamedTuple

from torchelastic.rendezvous import majority
from torchelastic.rendezvous.majority import Candidacy, Elector, Electorate, Roll

FIRST_TERM = 1
#: Any generation but the one that the hearer asks about.
NO_MATTER = -2


#: Its number, the nodes that train in it, and who formed it: its host, which may not be in it.
World = tuple[int, Electorate]
NO_WORLD: World = (-1, Electorate(frozenset()))
#: What a node's file says: the term it has voted in, for whom, and of the newest world.
File = tuple[int, str, Roll, World]


def elected(roll: Roll, votes: Mapping[str, int]) -> bool:
    """Return whether these votes elect a candidate: for each voter, the newest world it has."""
    return majority.to_claim(majority.confirmed(roll, votes).electorates, votes) == ()


class Node(NamedTuple):
    elector: Elector
    #: Of the newest world it has taken up.
    roll: Roll = Roll()
    world: World = NO_WORLD
    #: The world that its workers run.
    workers: World | None = None
    #: They wait for the word to begin in the world it has taken up; once stopped, they never do.
    waits: bool = False
    crashed: bool = False
    #: Its lease has ended in this generation: of worlds up to that one it is shown none any more.
    given_up: int = -1
    #: The newest world that it has made a step in; noted only where several jobs may be.
    stepped: World | None = None
    #: What its next agent would know; None: that would be another node.
    file: File | None = None

    @property
    def name(self) -> str:
        return self.elector.node

    @property
    def choice(self) -> tuple[int, str]:
        return self.elector.term, self.elector.chosen

    @property
    def session(self) -> tuple[int, str] | None:
        """The term and the node that it has for a host, itself included."""
        return self.choice if self.elector.has_host else None

    @property
    def is_host(self) -> bool:
        return self.elector.has_host and self.elector.chosen == self.name

    @property
    def is_over(self) -> bool:
        return self.workers is None and not self.waits

    def stopped(self) -> Node:
        return self._replace(workers=None, waits=False)

    def written(self) -> Node:
        """With all that it knows on its disk."""
        return self._replace(file=(*self.choice, self.roll, self.world))


@cache
def without_host(elector: Elector) -> Elector:
    return replace(elector, has_host=False)


class Record(NamedTuple):
    """The report of a node about itself to a host or candidate."""

    term: int
    host: str
    node: str
    generation: int
    #: Nothing that was begun under an earlier host runs here, nor anything of that generation.
    stopped: bool
    is_vote: bool = False


class Published(NamedTuple):
    """A world as a host has shown it; shown again when it is confirmed."""

    term: int
    host: str
    roll: Roll
    world: World
    #: Its nodes may begin.
    begins: bool


class State(NamedTuple):
    nodes: tuple[Node, ...]
    asked: frozenset[Candidacy] = frozenset()
    hosts: frozenset[tuple[int, str]] = frozenset()
    records: frozenset[Record] = frozenset()
    published: frozenset[Published] = frozenset()
    #: Term and host to whom a node has said that it leaves, or is about to.
    goodbyes: frozenset[tuple[int, str, str]] = frozenset()
    announced: frozenset[tuple[int, str, str]] = frozenset()
    #: Votes of the witness, who has claimed each, and in which term.
    claims: frozenset[tuple[str, str, int]] = frozenset()
    #: The newest world that has made a step.
    stepped: World = NO_WORLD
    #: How often votes were asked for, and the numbers that were given to worlds.
    elections: int = 0
    numbers: frozenset[int] = frozenset()
    restarts: int = 0

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.elector.node == name:
                return node
        raise KeyError(name)

    def having(self, changed: Node) -> State:
        name = changed.elector.node
        nodes = tuple([changed if node.elector.node == name else node for node in self.nodes])
        return State(nodes, *self[1:])  # as _replace, in half the time

    def recording(self, record: Record) -> State:
        return self._replace(records=self.records | {record})


class Move(NamedTuple):
    """The next action of a node. Plain data: it can be sorted, shown and done again."""

    kind: str
    node: str
    argument: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.node} {self.kind} {' '.join(map(str, self.argument))}".rstrip()


class Violation(AssertionError):
    """A law of the design does not hold."""


class Bounds(NamedTuple):
    """How far the search goes."""

    #: How often votes are asked for, and how many worlds are formed after the first.
    elections: int
    worlds: int
    leaves: int = 0
    crashes: int = 0
    restarts: int = 0


class Options(NamedTuple):
    """Broken rules, and the user's options."""

    #: Off: who votes, or takes up a world that has no place for it, lets its workers run on.
    stops_first: bool = True
    #: Off: a leave counts as consent while its workers still run.
    leavers_stop: bool = True
    #: On: who leaves says so before its workers have stopped. It need not take up what follows.
    leavers_announce: bool = False
    #: Off: workers begin at once in a world that does not confirm itself.
    waits_until_confirmed: bool = True
    #: Off: who has not taken up the last world agrees to the next one, too.
    agree_to_what_they_have: bool = True
    #: Off: a host that does not train goes on without the only node that does, and may still do.
    waits_for_lease: bool = True
    #: Whether a restarted node has its file; without it, and yet with a vote, it knows nothing.
    has_file: bool = True
    #: Off: it votes, says that it has a world, or shows one as its host, before that is written.
    writes_votes: bool = True
    writes_worlds: bool = True
    writes_formed: bool = True
    #: Off: it says to who would be host that it has a world before that is written.
    writes_wishes: bool = True
    #: Off: who says goodbye keeps its file.
    leavers_forget: bool = True
    #: On: workers of a world run before their node has written it down and told its host so.
    tells_later: bool = False
    #: `--two-node-takeover`: the other of two takes the host for dead; rightly, or just so.
    takeover: str = ""
    #: The vote of a node that has crashed is taken for given.
    counts_the_dead: bool = False
    #: Off: `--quorum none`. The host forms worlds from whoever is with it, and asks nobody.
    quorum: bool = True
    #: On: a host is in every world that it forms.
    hosts_train: bool = False
    #: Even electorates have a vote for the witness: storage in which each can be claimed once, by
    #: whoever asks, and that knows nothing.
    witness: bool = False
    #: Off: storage lets each node claim a vote that another has.
    claimed_once: bool = True
    #: Off: a vote claimed in one term counts in every other.
    claims_for_a_term: bool = True
    #: Several jobs may come of one, and give the same numbers: what is left of the laws is that on
    #: every node generations only grow.
    may_split: bool = False


BOUNDLESS = Bounds(*[10**6] * len(Bounds._fields))
PROPER = Options()


class Model:
    """The moves that are possible in a state, and what they lead to."""

    def __init__(self, bounds: Bounds = BOUNDLESS, options: Options = PROPER) -> None:
        self.bounds = bounds
        self.options = options
        self._kinds: dict[
            str, tuple[Callable[..., Iterator[tuple[object, ...]]], Callable[..., State]]
        ] = {
            "asks": (self._can_ask, self._ask),
            "votes": (self._can_vote, self._vote),
            "follows": (self._can_follow, self._follow),
            "stops": (self._can_stop, self._stop),
            "forms": (self._can_form, self._form),
            "takes": (self._can_take, self._take),
            "announces": (self._can_announce, self._announce),
            "leaves": (self._can_leave, self._leave),
            "crashes": (self._can_crash, self._crash),
            "claims": (self._can_claim, self._claim),
            "tells": (self._can_tell, self._tell),
            "restarts": (self._can_restart, self._restart),
            "loses": (self._can_lose, self._lose),
        }

    @property
    def kinds(self) -> list[str]:
        """Those that can happen within the bounds."""
        never = {
            "leaves": not self.bounds.leaves,
            "crashes": not self.bounds.crashes,
            "restarts": not self.bounds.restarts,
            "claims": not self.options.witness,
            "tells": not self.options.tells_later,
        }
        return [kind for kind in self._kinds if not never.get(kind)]

    def moves(self, state: State, kinds: Iterable[str] | None = None) -> Iterator[Move]:
        for kind in kinds or self._kinds:
            for node in state.nodes:
                yield from self.moves_of(state, kind, node)

    def moves_of(self, state: State, kind: str, node: Node) -> Iterator[Move]:
        if not node.crashed:
            for argument in self._kinds[kind][0](state, node):
                yield Move(kind, node.name, argument)

    def is_possible(self, state: State, move: Move) -> bool:
        return move in self.moves_of(state, move.kind, state.node(move.node))

    def after(self, state: State, move: Move) -> State:
        """The state after a possible move; raises `Violation`."""
        node = state.node(move.node)
        done = self._kinds[move.kind][1](state, node, *move.argument)
        if move.kind in ("asks", "votes", "claims"):
            done = self._count(done, done.node(node.name).elector)
        return self._stepping(self._spread(done, done.node(node.name).session))

    # --- asking for votes, and giving them -------------------------------------------------------

    def _can_ask(self, state: State, node: Node) -> Iterator[tuple[int]]:
        if state.elections >= self.bounds.elections or not node.roll.latest.nodes:
            return
        heard = max((asked.term for asked in state.asked), default=0)
        alone = without_host(node.elector)
        for term in {majority.next_term(alone), majority.next_term(alone, heard)}:
            ours = Candidacy(term, node.name, node.roll.generation, binding=True)
            if not majority.refusal(alone, ours):
                yield (term,)

    def _ask(self, state: State, node: Node, term: int) -> State:
        is_confirmed = not majority.confirmed(node.roll, self._wishes(state)).before
        generation = node.roll.generation
        ours = Candidacy(term, node.name, generation, binding=True, confirmed=is_confirmed)
        state = state._replace(asked=state.asked | {ours}, elections=state.elections + 1)
        return self._voting(state, node, ours)

    def _wishes(self, state: State) -> dict[str, int]:
        """The answers before a candidate asks for votes: the newest world of the others."""
        return {
            node.name: node.roll.generation
            for node in state.nodes
            if not node.crashed and not node.elector.leaving and self._is_written(node)
        }

    def _is_written(self, node: Node) -> bool:
        unwritten = node.file is not None and node.file[2].generation != node.roll.generation
        return not (unwritten and self.options.writes_wishes)

    def _can_vote(self, state: State, node: Node) -> Iterator[tuple[int, str]]:
        alone = without_host(node.elector)
        for asked in state.asked:
            if asked.node == node.name or not self._is_asked(state, node, asked):
                continue
            if not majority.refusal(alone, asked) and majority.voted(alone, asked) != alone:
                yield asked.term, asked.node

    def _is_asked(self, state: State, node: Node, asked: Candidacy) -> bool:
        """A candidate asks those who must agree."""
        electorates = state.node(asked.node).roll.electorates
        return any(node.name in electorate.nodes for electorate in electorates)

    def _vote(self, state: State, node: Node, term: int, candidate: str) -> State:
        asked = next(one for one in state.asked if (one.term, one.node) == (term, candidate))
        return self._voting(state, node, asked)

    def _voting(self, state: State, node: Node, asked: Candidacy) -> State:
        """Lose the host, stop the workers, and only then vote."""
        elector = majority.voted(without_host(node.elector), asked)
        is_told = asked.confirmed and asked.generation == node.roll.generation
        roll = replace(node.roll, before=()) if is_told else node.roll
        voted = self._stopping(node)._replace(elector=elector, roll=roll)
        voted = self._writing(state, voted, self.options.writes_votes)
        generation = node.roll.generation
        vote = Record(asked.term, asked.node, node.name, generation, stopped=True, is_vote=True)
        if node.elector.hands_over:
            said = state.goodbyes | {(asked.term, asked.node, node.name)}
            state = state._replace(goodbyes=said)
        return state.having(voted).recording(vote)

    def _votes(self, state: State, node: Node) -> dict[str, int]:
        votes = {
            record.node: record.generation
            for record in state.records
            if record.is_vote and (record.term, record.host) == (node.elector.term, node.name)
        }
        votes |= {name: -1 for name in self.taken_for_dead(state, node)}
        return votes | dict.fromkeys(self._claimed(state, node), NO_MATTER)

    def _stopping(self, node: Node) -> Node:
        return node.stopped() if self.options.stops_first else node

    def _count(self, state: State, voter: Elector) -> State:
        """Return whether the candidate has won by this vote; its voters follow it then."""
        candidate, session = state.node(voter.chosen), (voter.term, voter.chosen)
        # Who has won once, and yielded, does not win again by a vote that comes twice.
        stands = candidate.choice == session and session not in state.hosts
        if stands and elected(candidate.roll, self._votes(state, candidate)):
            state = self._win(state, candidate)
        if session not in state.hosts:
            return state
        for node in state.nodes:
            if node.choice == session and node.name != candidate.name and not node.crashed:
                elector = majority.following(node.elector, *session)
                state = state.having(node._replace(elector=elector))
        return state

    def _win(self, state: State, node: Node) -> State:
        term = node.elector.term
        if any(other == term for other, _ in state.hosts) and not self.options.may_split:
            raise Violation(f"two hosts of term {term}")
        roll = majority.confirmed(node.roll, self._votes(state, node))
        elector = majority.following(node.elector, term, node.name)
        host = node._replace(elector=elector, roll=roll)
        host = self._writing(state, host, self.options.writes_votes)
        taken_over = Published(term, node.name, roll, node.world, begins=False)
        return state.having(host)._replace(
            hosts=state.hosts | {(term, node.name)}, published=state.published | {taken_over}
        )

    def taken_for_dead(self, state: State, node: Node) -> set[str]:
        """Nodes that count as having agreed to whatever this one does."""
        crashed = {other.name for other in state.nodes if other.crashed}
        if self.options.counts_the_dead:
            return crashed
        host = node.roll.latest.host
        if not self.options.takeover or len(node.roll.latest.nodes) != 2 or host == node.name:
            return set()
        return {host} if self.options.takeover == "blind" else {host} & crashed

    # --- the witness -----------------------------------------------------------------------------

    def _claimed(self, state: State, node: Node) -> set[str]:
        """The votes of the witness that a host or candidate has in its term."""
        return {
            vote
            for vote, holder, term in state.claims
            if holder == node.name
            and (term == node.elector.term or not self.options.claims_for_a_term)
        }

    def _can_claim(self, state: State, node: Node) -> Iterator[tuple[str]]:
        """The votes missing to form a world, or to win a term for which it has asked for votes."""
        if not self.options.witness or node.elector.chosen != node.name:
            return
        if node.is_host:
            roll, votes = node.roll, self._agree(state, node)
        elif node.choice not in state.hosts:
            votes = set(self._votes(state, node))
            roll = majority.confirmed(node.roll, self._votes(state, node))
        else:
            return
        if node.name not in node.roll.latest.nodes:
            return
        taken = {vote for vote, holder, _ in state.claims if self._refuses(holder, node)}
        for vote in majority.to_claim(roll.electorates, votes) or ():
            if vote not in taken:
                yield (vote,)

    def _refuses(self, holder: str, node: Node) -> bool:
        return self.options.claimed_once or holder == node.name

    def _claim(self, state: State, node: Node, vote: str) -> State:
        claims = state.claims | {(vote, node.name, node.elector.term)}
        state = state.having(self._stopping(node))._replace(claims=claims)
        if self.options.waits_for_lease and node.name not in node.world[1].nodes:
            return self._after_a_lease(state, node)
        return state

    # --- a host and those who follow it ----------------------------------------------------------

    def _can_follow(self, state: State, node: Node) -> Iterator[tuple[int, str]]:
        alone = without_host(node.elector)
        for term, host in state.hosts:
            is_another = host != node.name and (term, host) != node.session
            if is_another and majority.may_follow(alone, term):
                yield term, host

    def _follow(self, state: State, node: Node, term: int, host: str) -> State:
        follower = node._replace(elector=majority.following(node.elector, term, host))
        return self._saying(state, follower, stopped=node.is_over)

    def _saying(self, state: State, node: Node, *, stopped: bool) -> State:
        """A node tells its host how it stands."""
        assert node.session is not None
        node = self._writing(state, node, self.options.tells_later)
        record = Record(*node.session, node.name, node.roll.generation, stopped)
        return state.having(node).recording(record)

    def _can_stop(self, state: State, node: Node) -> Iterator[tuple[()]]:
        if node.session is not None and not node.is_host and not node.is_over:
            yield ()

    def _stop(self, state: State, node: Node) -> State:
        return self._saying(state, node.stopped(), stopped=True)

    def _can_lose(self, state: State, node: Node) -> Iterator[tuple[()]]:
        if node.elector.has_host:
            yield ()

    def _lose(self, state: State, node: Node) -> State:
        """Know of no host, or be it no more, and stop for that; implied by what may come next."""
        return state.having(node.stopped()._replace(elector=without_host(node.elector)))

    def _can_leave(self, state: State, node: Node) -> Iterator[tuple[()]]:
        if node.session is None:
            return
        said = (*node.session, node.name)
        if said in state.announced - state.goodbyes or self._may_begin_to_leave(state, node):
            yield ()

    def _may_begin_to_leave(self, state: State, node: Node) -> bool:
        leaving = [one for one in state.nodes if one.elector.leaving or one.elector.hands_over]
        return len(leaving) < self.bounds.leaves and node not in leaving

    def _leave(self, state: State, node: Node) -> State:
        """Stop, and say goodbye; before that, an announced leave is no consent to another world. A
        host is host no more then, and votes once."""
        assert node.session is not None
        left = node.stopped() if self.options.leavers_stop else node
        if self.options.leavers_forget:
            left = left._replace(file=None)
        if node.is_host:
            parting = replace(without_host(node.elector), hands_over=True)
            return state.having(left._replace(elector=parting))
        goodbyes = state.goodbyes | {(*node.session, node.name)}
        leaving = replace(node.elector, leaving=True)
        return state.having(left._replace(elector=leaving))._replace(goodbyes=goodbyes)

    def _can_announce(self, state: State, node: Node) -> Iterator[tuple[()]]:
        can = self.options.leavers_announce and node.session is not None and not node.is_host
        if can and self._may_begin_to_leave(state, node):
            yield ()

    def _announce(self, state: State, node: Node) -> State:
        assert node.session is not None
        announced = state.announced | {(*node.session, node.name)}
        leaving = node._replace(elector=replace(node.elector, leaving=True), file=None)
        return state.having(leaving)._replace(announced=announced)

    def _can_crash(self, state: State, node: Node) -> Iterator[tuple[()]]:
        if sum(other.crashed for other in state.nodes) < self.bounds.crashes:
            yield ()

    def _crash(self, state: State, node: Node) -> State:
        return state.having(node.stopped()._replace(crashed=True))

    def _writing(self, state: State, node: Node, now: bool) -> Node:
        """The node with its file written, if it is `now`, and its next agent may need it."""
        needed = state.restarts < self.bounds.restarts and not node.elector.leaving
        return node.written() if now and needed else node

    def _can_restart(self, state: State, node: Node) -> Iterator[tuple[()]]:
        if state.restarts < self.bounds.restarts and node.file is not None:
            yield ()

    def _restart(self, state: State, node: Node) -> State:
        """The end of an agent and of its workers, and the next one, with the file of the last."""
        assert node.file is not None
        file = node.file if self.options.has_file else (0, "", Roll(), NO_WORLD)
        term, chosen, roll, world = file
        elector = Elector(node.name, term, chosen, roll.generation)
        resumed = node.stopped()._replace(elector=elector, roll=roll, world=world, file=file)
        state = state.having(resumed)._replace(restarts=state.restarts + 1)
        if state.restarts < self.bounds.restarts:
            return state
        return state._replace(nodes=tuple(one._replace(file=None) for one in state.nodes))

    # --- worlds ----------------------------------------------------------------------------------

    def _can_form(self, state: State, node: Node) -> Iterator[tuple[tuple[str, ...]]]:
        if not node.is_host or len(state.numbers) > self.bounds.worlds:
            return
        agree = self._agree(state, node)
        if not self.options.quorum or majority.agreed(node.roll.electorates, agree):
            ready = {record.node for record in self._table(state, node) if record.stopped}
            needed = {node.name} if self.options.hosts_train else set()
            yield from ((nodes,) for nodes in subsets(ready | {node.name}) if needed <= set(nodes))

    def _table(self, state: State, node: Node) -> list[Record]:
        return [record for record in state.records if (record.term, record.host) == node.session]

    def _agree(self, state: State, node: Node) -> set[str]:
        """The nodes that agree to another world of this host."""
        agree = self._said_goodbye(state, node) | {node.name} | self._claimed(state, node)
        # Whoever follows a new host runs nothing that an earlier one has formed.
        any_will_do = node.roll.generation < majority.first_generation(node.elector.term)
        any_will_do |= not self.options.agree_to_what_they_have
        return agree | {
            record.node
            for record in self._table(state, node)
            if record.stopped and (any_will_do or record.generation == node.roll.generation)
        }

    def _said_goodbye(self, state: State, node: Node) -> set[str]:
        said = {name for *session, name in state.goodbyes if tuple(session) == node.session}
        return said | self.taken_for_dead(state, node)

    def _departing(self, state: State, node: Node) -> set[str]:
        """The nodes that need not take up a world of this host."""
        said = {name for *session, name in state.announced if tuple(session) == node.session}
        return said | self._said_goodbye(state, node)

    def _form(self, state: State, node: Node, nodes: tuple[str, ...]) -> State:
        term, gone = node.elector.term, self._departing(state, node)
        generation = majority.next_generation(node.roll.generation, term)
        if generation in state.numbers and not self.options.may_split:
            raise Violation(f"generation {generation} was given twice")
        before = node.roll if self.options.quorum else Roll()  # who is not asked is not noted
        roll = majority.formed(
            before,
            generation,
            nodes,
            node.name,
            witness=self.options.witness and majority.may_tie(nodes, node.name),
            held=self._claimed(state, node),
        )
        roll = majority.confirmed(roll, {}, gone)
        begins = majority.confirms_itself(roll, gone) or not self.options.waits_until_confirmed
        world = (generation, Electorate(frozenset(nodes), node.name))
        shown = Published(term, node.name, roll, world, begins)
        if self.options.waits_for_lease and self.options.quorum:
            state = self._after_a_lease(state, node)
        state = state._replace(
            published=state.published | {shown}, numbers=state.numbers | {generation}
        )
        held = self._held(node, shown)
        return state.having(self._writing(state, held, self.options.writes_formed))

    def _after_a_lease(self, state: State, host: Node) -> State:
        """None of those who train has agreed: the host has waited until their leases had ended.

        That can only be so where one node trains, and its host does not: see `majority`.
        """
        alone = host.world[1].nodes
        if alone & self._agree(state, host) or not alone:
            return state
        for node in map(state.node, sorted(alone)):
            given_up = node._replace(given_up=host.world[0])
            if node.world == host.world:
                given_up = given_up.stopped()
            if node.session == host.session:
                given_up = given_up._replace(elector=without_host(node.elector))
            state = state.having(given_up)
        return state

    def _can_take(self, state: State, node: Node) -> Iterator[tuple[int]]:
        found = {
            shown.roll.generation
            for shown in state.published
            if (shown.term, shown.host) == node.session and not node.is_host
            if shown.roll.generation > node.given_up
        }
        for generation in found:
            if majority.may_take_up(node.elector, generation):
                yield (generation,)

    def _take(self, state: State, node: Node, generation: int) -> State:
        """As it was shown first; `_spread` tells what has been said of it since."""
        shown = max(
            (
                shown
                for shown in state.published
                if (shown.term, shown.host) == node.session and shown.roll.generation == generation
            ),
            key=lambda shown: (len(shown.roll.before), not shown.begins),
        )
        held = self._held(node, shown)
        if self.options.tells_later:
            return state.having(held)
        held = self._writing(state, held, self.options.writes_worlds)
        return self._saying(state, held, stopped=held.is_over)

    def _can_tell(self, state: State, node: Node) -> Iterator[tuple[()]]:
        untold = node.file is None or node.file[2].generation != node.roll.generation
        if self.options.tells_later and node.session and not node.is_host and untold:
            yield ()

    def _tell(self, state: State, node: Node) -> State:
        return self._saying(state, node, stopped=node.is_over)

    def _held(self, node: Node, shown: Published) -> Node:
        """The node with a newer world, its workers in the old one stopped."""
        elector = replace(node.elector, generation=shown.roll.generation)
        held = node._replace(elector=elector, roll=shown.roll, world=shown.world)
        if node.name not in shown.world[1].nodes or node.elector.leaving:
            return self._stopping(held)
        return held._replace(workers=held.world if shown.begins else None, waits=not shown.begins)

    # --- what follows at once --------------------------------------------------------------------

    def _spread(self, state: State, session: tuple[int, str] | None) -> State:
        """The host of a session finds its world confirmed, and those who follow it hear of it."""
        if session is None:
            return state
        host = state.node(session[1])
        if host.session == session and not host.crashed:
            state = self._note_confirmed(state, host)
        shown = [one for one in state.published if (one.term, one.host) == session]
        for node in state.nodes:
            if node.session == session and not node.crashed:
                state = self._hear(state, node, shown)
        return state

    def _note_confirmed(self, state: State, host: Node) -> State:
        if not host.roll.before:
            return state
        accepted = {
            record.node: record.generation
            for record in state.records
            if (record.term, record.host) == host.session
            and record.generation == host.roll.generation
        }
        roll = majority.confirmed(host.roll, accepted, self._departing(state, host))
        state = state.having(host._replace(roll=roll))
        if roll.before or roll.generation < majority.first_generation(host.elector.term):
            return state
        shown = Published(host.elector.term, host.name, roll, host.world, begins=True)
        return state._replace(published=state.published | {shown})

    def _hear(self, state: State, node: Node, shown: list[Published]) -> State:
        heard = node
        for one in shown:
            if one.world != node.world:
                continue
            if heard.waits and one.begins:
                heard = heard._replace(workers=node.world, waits=False)
            if heard.roll.before and not one.roll.before:
                heard = heard._replace(roll=one.roll)
        return state if heard is node else state.having(heard)

    def _stepping(self, state: State) -> State:
        """A world whose nodes all run it makes a step, unless a law forbids it."""
        running = [(node.name, node.workers) for node in state.nodes if node.workers]
        for world in {world for _, world in running} - {state.stepped}:
            if world[1].nodes <= {name for name, theirs in running if theirs == world}:
                state = self._step(state, world)
        return state

    def _step(self, state: State, world: World) -> State:
        if not self.options.may_split:
            _check_growth("there", state.stepped, world)
            return state._replace(stepped=world)
        for node in map(state.node, sorted(world[1].nodes)):
            if node.stepped is not None and node.stepped != world:
                _check_growth(node.name, node.stepped, world)
            state = state.having(node._replace(stepped=world))
        return state._replace(stepped=max(state.stepped, world, key=lambda one: one[0]))


def _check_growth(where: str, last: World, world: World) -> None:
    if world[0] <= last[0]:
        raise Violation(f"{where} is a step in {shown(world)} after {shown(last)}")


def shown(world: World) -> str:
    return f"{world[0]} ({' '.join(sorted(world[1].nodes))})"


def subsets(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    ordered = sorted(names)
    return chain.from_iterable(combinations(ordered, count) for count in range(1, len(ordered) + 1))


def running(count: int, newcomers: int = 0, *, spare: bool = False, witness: bool = False) -> State:
    """Nodes a, b, … train in the first world, hosted by a, which may be a `spare`; newcomers hold
    nothing yet."""
    names = "abcdefgh"[: count + newcomers]
    members = names[:count]
    train = members[spare:]
    roll = majority.formed(Roll(), 0, train, members[0], witness=witness)
    elector = Elector("", FIRST_TERM, members[0], 0, has_host=True)
    world = (roll.generation, Electorate(frozenset(train), members[0]))
    nodes = [
        Node(replace(elector, node=name), roll, world, world if name in train else None).written()
        for name in members
    ]
    nodes += [Node(Elector(name)) for name in names[count:]]
    shown = Published(FIRST_TERM, members[0], roll, world, begins=True)
    records = [Record(FIRST_TERM, members[0], name, 0, stopped=False) for name in members]
    return State(
        tuple(nodes),
        hosts=frozenset({(FIRST_TERM, members[0])}),
        records=frozenset(records),
        published=frozenset({shown}),
        stepped=world,
        numbers=frozenset({0}),
    )


def essence(state: State) -> State:
    """Without what nobody can hear any more to any effect, so that fewer states differ.

    A record is of use to the host or candidate it was made to; a request for votes while it may
    still win (else it only binds those who hear it); a host and its worlds to who may follow it.
    """
    terms = {node.name: node.elector.term for node in state.nodes}
    lowest = min(terms.values())
    held = min(node.elector.generation for node in state.nodes)
    return state._replace(
        asked=frozenset(one for one in state.asked if terms[one.node] == one.term),
        hosts=frozenset(one for one in state.hosts if one[0] >= lowest),
        records=frozenset(_essential(state)),
        goodbyes=frozenset(one for one in state.goodbyes if terms[one[1]] == one[0]),
        announced=frozenset(one for one in state.announced if terms[one[1]] == one[0]),
        published=frozenset(
            one
            for one in state.published
            if one.term >= lowest and (one.roll.generation > held or not one.begins)
        ),
    )


def _essential(state: State) -> Iterator[Record]:
    """Of what was said to a host: its votes have been counted, and of other worlds than its own
    only that nothing runs there is of interest."""
    hearers = {node.choice: node for node in state.nodes if node.elector.chosen == node.name}
    for record in state.records:
        hearer = hearers.get((record.term, record.host))
        if hearer is None:
            continue
        if hearer.elector.has_host and record.generation != hearer.roll.generation:
            record = record._replace(generation=NO_MATTER)
        if record.is_vote and hearer.elector.has_host:
            record = record._replace(is_vote=False)
        if record.stopped or record.generation != NO_MATTER:
            yield record


def cold(count: int) -> State:
    """Nodes that were started with the list of all of them, and know nothing else."""
    names = "abcdefgh"[:count]
    roll = Roll(latest=Electorate(frozenset(names)))
    return State(tuple(Node(Elector(name), roll).written() for name in names))
