"""Ways through the model of embedded failover: all of them within bounds, by chance, and fair."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

from tests.unit.rendezvous.majority_model import (
    Model,
    Move,
    Node,
    State,
    Violation,
    essence,
    without_host,
)
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.election import Poll
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.majority import Candidacy


class Explored(NamedTuple):
    states: int
    #: Nothing is left within the bounds.
    is_all: bool


def search(model: Model, first: State, *, states: int) -> Explored:
    """That many states within the bounds, nearest first; a violation comes with the way there.

    "loses" is left out: it is part of the moves that come next.
    """
    kinds = [kind for kind in model.kinds if kind != "loses"]
    seen, edge = {hash(first)}, [(first, ())]
    while edge:
        beyond = []
        for state, way in edge:
            for move in model.moves(state, kinds):
                after = essence(_explained(model, state, move, way))
                # By their hash alone: a million whole states would not fit.
                if (mark := hash(after)) not in seen:
                    seen.add(mark)
                    beyond.append((after, (way, move)))
            if len(seen) >= states:
                return Explored(len(seen), is_all=False)
        edge = beyond
    return Explored(len(seen), is_all=True)


def _explained(model: Model, state: State, move: Move, way: Any) -> State:
    try:
        return model.after(state, move)
    except Violation as found:
        moves = [move]
        while way:
            way, earlier = way
            moves.append(earlier)
        raise Violation("\n".join([str(found), *map(str, reversed(moves))])) from None


#: How often a wanderer tries each kind of move: what mends more often than what breaks.
LIKELY = {
    "takes": 8,
    "stops": 6,
    "votes": 8,
    "follows": 4,
    "forms": 4,
    "asks": 2,
    "claims": 2,
    "loses": 1,
    "leaves": 0.3,
    "announces": 0.3,
    "crashes": 0.3,
    "restarts": 0.3,
    "tells": 3,
}


def wander(model: Model, first: State, length: int, seed: int) -> State:
    """One long way through the states, by chance; a violation comes with the moves that matter."""
    chance, state, moves = Random(seed), first, []
    likely = {kind: LIKELY[kind] for kind in LIKELY if kind != "claims" or model.options.witness}
    for kind in chance.choices(list(likely), list(likely.values()), k=length):
        possible = sorted(model.moves(state, [kind]))
        if possible:
            moves.append(chance.choice(possible))
            try:
                state = model.after(state, moves[-1])
            except Violation:
                raise violation(model, first, moves) from None
    return state


def violation(model: Model, first: State, moves: list[Move]) -> Violation:
    """The violation at the end of a way, with those moves left out that it does not need."""
    found = Violation("none when done again")
    for index in reversed(range(len(moves) + 1)):
        shorter = moves[:index] + moves[index + 1 :]
        again = outcome(model, first, shorter)
        if isinstance(again, Violation):
            moves, found = shorter, again
    return Violation("\n".join([str(found), *map(str, moves)]))


def outcome(model: Model, first: State, moves: Iterable[Move]) -> State | Violation:
    """The end of these moves, without those that are not possible any more."""
    state = first
    for move in moves:
        try:
            if model.is_possible(state, move):
                state = model.after(state, move)
        except Violation as found:
            return found
    return state


# --- fair runs: what the loops do, with everybody in a group hearing the others at once ----------


def calm_down(model: Model, state: State, group: Iterable[str], rounds: int = 50) -> State:
    """The nodes of a group act in turn until nobody has anything to do."""
    there = frozenset(group)
    for _ in range(rounds):
        before = state
        for name in sorted(there):
            node = state.node(name)
            if not node.crashed and not node.elector.leaving:
                state = _act(model, state, node, there)
        if state == before:
            return state
    raise AssertionError(f"still no end after {rounds} rounds: {state}")


def _act(model: Model, state: State, node: Node, there: frozenset[str]) -> State:
    if node.is_host:
        return _host(model, state, node, there)
    if node.session is not None:
        return _serve(model, state, node, there)
    hosts = [
        other
        for other in state.nodes
        if other.is_host and other.name in there and _would_follow(node, other)
    ]
    for move in model.moves_of(state, "follows", node):
        if any(host.session == move.argument for host in hosts):
            return model.after(state, move)
    return (
        state
        if hosts or not node.roll.latest.nodes
        else _run_for_election(model, state, node, there)
    )


def _would_follow(node: Node, host: Node) -> bool:
    poll = Poll(without_host(node.elector), FailoverState(), places=())
    return poll.may_follow(host.elector.term, host.roll.generation)


def _host(model: Model, state: State, host: Node, there: frozenset[str]) -> State:
    terms = [state.node(name).elector.term for name in there]
    if any(majority.must_step_down(host.elector.term, term) for term in terms):
        return model.after(state, Move("loses", host.name))
    nodes = tuple(sorted(node.name for node in _followers(state, host, there)))
    if not _wants_another(state, host, there):
        return state
    state = _claimed(model, state, host.name)
    forming = Move("forms", host.name, (nodes,))
    return model.after(state, forming) if model.is_possible(state, forming) else state


def _claimed(model: Model, state: State, name: str) -> State:
    """The missing votes are the witness's, if those are enough then."""
    for move in sorted(model.moves_of(state, "claims", state.node(name))):
        state = model.after(state, move)
    return state


def _wants_another(state: State, host: Node, there: frozenset[str]) -> bool:
    """Return whether the world is not the host's own, has other nodes, or lost one's workers."""
    followers = _followers(state, host, there)
    return (
        host.roll.generation < majority.first_generation(host.elector.term)
        or {node.name for node in followers} != host.world[1].nodes
        or any(node.world == host.world and node.is_over for node in followers)
    )


def _followers(state: State, host: Node, there: frozenset[str]) -> list[Node]:
    living = (state.node(name) for name in there)
    return [
        node
        for node in living
        if node.session == host.session and not node.crashed and not node.elector.leaving
    ]


def _serve(model: Model, state: State, node: Node, there: frozenset[str]) -> State:
    """Take up the newest world; stop when the host would form another one."""
    assert node.session is not None
    host = state.node(node.session[1])
    if host.session != node.session or host.crashed or host.name not in there:
        return model.after(state, Move("loses", node.name))
    newer = sorted(model.moves_of(state, "takes", node))
    if newer:
        return model.after(state, newer[-1])
    if _wants_another(state, host, there) and not node.is_over:
        return model.after(state, Move("stops", node.name))
    return state


def _run_for_election(model: Model, state: State, node: Node, there: frozenset[str]) -> State:
    """Ask who would vote, and only if that is enough, for the votes."""
    others = [state.node(name) for name in there]
    term = majority.next_term(node.elector, max(other.elector.term for other in others))
    wish = Candidacy(term, node.name, node.elector.generation, binding=False)
    willing = [
        other for other in others if not other.crashed and not majority.refusal(other.elector, wish)
    ]
    votes = {other.name: other.elector.generation for other in willing}
    votes |= dict.fromkeys(model.taken_for_dead(state, node), -1)
    roll = majority.confirmed(node.roll, votes)
    missing = majority.to_claim(roll.electorates, votes)
    if missing is None or {vote for vote, *_ in state.claims} & set(missing):
        return state
    state = model.after(state, Move("asks", node.name, (term,)))
    for other in willing:
        vote = Move("votes", other.name, (term, node.name))
        if model.is_possible(state, vote):
            state = model.after(state, vote)
    return _claimed(model, state, node.name)
