"""Embedded failover in every order of events: laws 1 and 2 of the design, and that it goes on.

1. At most one world makes progress: once a world has made a step, no older one does.
2. Generations only grow, and no number is given twice.
"""

from __future__ import annotations

import faulthandler
from dataclasses import replace

import pytest

from tests.unit.rendezvous.succession_model import (
    PROPER,
    Bounds,
    Model,
    Move,
    Options,
    Violation,
    cold,
    running,
)
from tests.unit.rendezvous.succession_search import calm_down, outcome, search, wander
from torchelastic.rendezvous import succession
from torchelastic.rendezvous.succession import Electorate, Roll

WIDE = Bounds(elections=12, worlds=12, leaves=1, crashes=1)


@pytest.fixture
def without_watchdog():
    """Looking at the stack of a thread that runs Python, after a minute, can crash the process."""
    faulthandler.cancel_dump_traceback_later()


# --- the laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "bounds", "states"),
    [
        (running(2), Bounds(2, 2, leaves=1, crashes=1), 10_000),
        (running(2, 1), Bounds(1, 1), 1000),
        (running(3), Bounds(1, 1, leaves=1), 5000),
        (running(3), Bounds(2, 1), 10_000),
        (cold(3), Bounds(1, 1), 2000),
    ],
    ids=["two", "two, newcomer", "three, leave", "three", "cold"],
)
def test_in_every_order_of_events(first, bounds, states):
    explored = search(Model(bounds), first)
    assert explored.is_all
    assert explored.states > states


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("without_watchdog")
@pytest.mark.parametrize(
    ("first", "bounds"),
    [
        (running(2, 1), Bounds(1, 2)),
        (running(3), Bounds(2, 2)),
        (running(3, 1), Bounds(1, 1)),
        (running(3), Bounds(1, 2, leaves=1)),
        (running(4), Bounds(1, 1)),
        (cold(3), Bounds(2, 1)),
    ],
    ids=["two, newcomer", "three", "three, newcomer", "three, leave", "four", "cold"],
)
def test_in_every_order_of_more_events(first, bounds):
    assert search(Model(bounds), first).is_all


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("without_watchdog")
def test_as_far_as_a_hundred_thousand_states_reach():
    search(Model(Bounds(3, 3, leaves=1, crashes=1)), running(3, 1), states=100_000)


@pytest.mark.parametrize(
    ("first", "walks"),
    [(running(3, 1), 200), (running(4, 1), 100), (running(5, 1), 100), (cold(3), 100)],
    ids=["three", "four", "five", "cold"],
)
def test_by_chance(first, walks):
    made_steps = 0
    for seed in range(walks):
        made_steps += wander(Model(WIDE), first, 150, seed).stepped[0] > 0
    assert made_steps > walks / 2, "a way that leads nowhere shows nothing"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("without_watchdog")
@pytest.mark.parametrize("count", [3, 4, 5])
def test_by_chance_for_longer(count):
    for seed in range(3000):
        wander(Model(WIDE), running(count, 2), 250, seed)


# --- checks of the check: without any one of the rules it must fail ------------------------------

REFUSAL = succession.refusal


def any_vote_will_do(electorates, votes):
    return all(any(node in votes for node in each.nodes) for each in electorates)


def forgets_who_had_to_agree(roll, generation, nodes, host):
    return Roll(generation, Electorate(frozenset(nodes), host))


WITHOUT = {
    "majority": ("agreed", any_vote_will_do),
    "one vote a term": (
        "refusal",
        lambda elector, asked: REFUSAL(replace(elector, chosen=asked.node), asked),
    ),
    "no vote for who knows less": (
        "refusal",
        lambda elector, asked: REFUSAL(replace(elector, generation=-1), asked),
    ),
    "no vote of a leaver": (
        "refusal",
        lambda elector, asked: REFUSAL(replace(elector, leaving=False), asked),
    ),
    "those before": ("formed", forgets_who_had_to_agree),
    "leaving a number out": ("next_term", lambda elector, heard=0: max(elector.term, heard) + 1),
    "not following an earlier term": (
        "may_follow",
        lambda elector, term: not elector.has_host,
    ),
    "taking up only the host's own worlds": (
        "may_take_up",
        lambda elector, generation: generation > elector.generation,
    ),
}

#: Where the shortest way to a violation is too long to be searched for.
WAYS = {
    # a and b go on while c, which knows nothing of that, is elected by b.
    "no vote for who knows less": """
        b stops
        a forms a b
        b takes 1
        c asks 3
        b votes 3 c
        c forms c
        a forms a""",
    # Two worlds that nobody else has: 1 of a, 2 of c. a is elected and shows 1 to b. Were 1 settled
    # by that, a could go on with d alone; and b would still vote for c, which has the newer 2.
    "taking up only the host's own worlds": """
        d follows 1 a
        e follows 1 a
        b stops
        a forms a d e
        c asks 3
        b votes 3 c
        c forms c
        a asks 4
        b votes 4 a
        d votes 4 a
        b takes 1
        a forms a d
        d takes 3
        c asks 5
        b votes 5 c
        c forms c
        a forms a""",
}


@pytest.mark.parametrize("rule", sorted(WITHOUT.keys() - WAYS.keys()))
def test_every_rule_is_needed(rule, monkeypatch):
    monkeypatch.setattr(succession, *WITHOUT[rule])
    with pytest.raises(Violation):
        search(Model(Bounds(2, 2, leaves=int("leaver" in rule))), running(3), states=20_000)


@pytest.mark.parametrize("rule", WAYS)
def test_every_rule_is_needed_on_a_long_way(rule, monkeypatch):
    assert not isinstance(end_of(WAYS[rule]), Violation)
    monkeypatch.setattr(succession, *WITHOUT[rule])
    assert isinstance(end_of(WAYS[rule]), Violation)


def test_who_agrees_has_the_world_that_is_left_behind():
    """b knows of neither 1 nor 2: so no majority does, and the next host would use 2 again."""
    way = """
        b stops
        a forms a
        a forms a
        c asks 3
        b votes 3 c
        c forms c"""
    assert not isinstance(end_of(way), Violation)
    assert isinstance(end_of(way, Options(agree_to_what_they_have=False)), Violation)


def end_of(way, options=PROPER):
    moves = [move(line) for line in way.split("\n") if line]
    return outcome(Model(options=options), running(3, 2), moves)


def move(line):
    """As it is shown; numbers are terms or generations."""
    node, kind, *words = line.split()
    if kind == "forms":
        return Move(kind, node, (tuple(words),))
    return Move(kind, node, tuple(int(word) if word.isdigit() else word for word in words))


@pytest.mark.parametrize(
    "options",
    [
        Options(stops_first=False),
        Options(leavers_stop=False),
        Options(waits_until_settled=False),
        Options(counts_the_dead=True),
    ],
    ids=[
        "stop first",
        "leavers stop first",
        "wait until settled",
        "the dead do not vote",
    ],
)
def test_everything_done_is_needed(options):
    leaves, crashes = int(not options.leavers_stop), int(options.counts_the_dead)
    bounds = Bounds(2, 2, leaves=leaves, crashes=crashes)
    with pytest.raises(Violation):
        search(Model(bounds, options), running(3), states=20_000)


# --- two nodes -----------------------------------------------------------------------------------


def test_of_two_the_host_goes_on_alone_and_the_other_does_not():
    model = Model()
    cut = running(2)
    assert calm_down(model, cut, "a").stepped[1].nodes == {"a"}
    assert calm_down(model, cut, "b").stepped == cut.stepped


def test_the_other_of_two_takes_over_from_a_dead_host():
    right = Options(takeover="right")
    assert search(Model(Bounds(1, 1, crashes=1), right), running(2)).is_all
    dead = outcome(Model(), running(2), [Move("crashes", "a")])
    assert calm_down(Model(options=right), dead, "b").stepped[1].nodes == {"b"}


@pytest.mark.parametrize(
    ("first", "options", "worlds"),
    [
        (running(2), Options(takeover="blind"), 2),
        (running(2), Options(takeover="right"), 3),
        (running(2, 1), Options(takeover="right"), 3),
    ],
    ids=["the host lives", "it had gone on alone", "it had gone on with a newcomer"],
)
def test_a_takeover_trusts_that_the_host_died_in_the_world_of_the_two(first, options, worlds):
    """Otherwise both go on, or a number comes twice: why it is only done when asked for."""
    with pytest.raises(Violation):
        search(Model(Bounds(2, worlds, crashes=1), options), first)


# --- without quorum ------------------------------------------------------------------------------

NO_QUORUM = Options(quorum=False)
TWO_JOBS = Options(quorum=False, may_split=True)


@pytest.mark.parametrize("first", [running(2, 1), running(3)], ids=["two, newcomer", "three"])
def test_without_quorum_the_laws_hold_while_the_only_host_trains_itself(first):
    bounds = Bounds(elections=0, worlds=2, leaves=1, crashes=1)
    explored = search(Model(bounds, NO_QUORUM._replace(hosts_train=True)), first)
    assert explored.is_all
    assert explored.states > 1000


@pytest.mark.parametrize(
    ("options", "elections"),
    [(NO_QUORUM, 0), (NO_QUORUM._replace(hosts_train=True), 1)],
    ids=["the host does not train", "another host"],
)
def test_without_quorum_a_job_can_become_two(options, elections):
    """Which is why it is only done when asked for."""
    with pytest.raises(Violation):
        search(Model(Bounds(elections, 2), options), running(3))


@pytest.mark.parametrize(
    ("first", "bounds"),
    [(running(2), Bounds(2, 2)), (running(3), Bounds(1, 1))],
    ids=["two", "three"],
)
def test_without_quorum_generations_grow_on_every_node(first, bounds):
    explored = search(Model(bounds, TWO_JOBS), first)
    assert explored.is_all
    assert explored.states > 1000


def test_without_quorum_they_grow_by_chance_too():
    for seed in range(100):
        wander(Model(WIDE, TWO_JOBS), running(4, 1), 150, seed)


def test_the_check_of_that_needs_the_rule_about_newer_worlds(monkeypatch):
    monkeypatch.setattr(succession, "may_take_up", lambda elector, generation: True)
    with pytest.raises(Violation):
        search(Model(Bounds(1, 2), TWO_JOBS), running(3), states=20_000)


@pytest.mark.parametrize("side", ["a", "ab", "abc", "abcd"])
def test_without_quorum_the_hosts_side_goes_on(side):
    after = calm_down(Model(options=NO_QUORUM), running(5), side)
    assert after.stepped[1].nodes == set(side)
    assert not after.node("a").roll.before


@pytest.mark.parametrize("worlds", [0, 1, 8])
def test_without_quorum_the_two_sides_are_one_again_when_the_cut_heals(worlds):
    """However many worlds the old host has formed alone: who has the newest one leads on."""
    model = Model(options=TWO_JOBS)
    alone = [Move("forms", "a", (("a",),))] * worlds
    apart = calm_down(model, outcome(model, running(3), alone), "a")
    apart = calm_down(model, apart, "bc")
    assert apart.node("b").session != apart.node("a").session
    healed = calm_down(model, apart, "abc")
    assert healed.stepped[1].nodes == set("abc")
    assert healed.stepped[0] > max(node.stepped[0] for node in apart.nodes)


# --- it goes on ----------------------------------------------------------------------------------


def names(state):
    return {node.name for node in state.nodes if not node.crashed}


@pytest.mark.parametrize("first", [running(3), running(3, 1), running(4), running(5)])
def test_when_the_host_dies_the_others_go_on(first):
    dead = outcome(Model(), first, [Move("crashes", "a")])
    after = calm_down(Model(), dead, names(dead))
    assert after.stepped[1].nodes == names(dead)


@pytest.mark.parametrize(
    ("majority", "minority"), [("cde", "ab"), ("abc", "de"), ("ade", "bc"), ("bcde", "a")]
)
@pytest.mark.parametrize("sooner", ["majority", "minority"])
def test_a_cut_stops_the_minority_until_it_heals(majority, minority, sooner):
    state, model = running(5), Model()
    for half in (majority, minority) if sooner == "majority" else (minority, majority):
        state = calm_down(model, state, half)
    assert state.stepped[1].nodes == set(majority)
    assert calm_down(model, state, "abcde").stepped[1].nodes == set("abcde")


def test_who_voted_in_vain_is_not_shut_out():
    """b asked for votes in a term that nobody heard of; a, still host, is of an earlier one."""
    asked = outcome(Model(), running(3), [Move("asks", "b", (3,))])
    assert calm_down(Model(), asked, "abc").stepped[1].nodes == set("abc")
    alone = outcome(Model(), asked, [Move("crashes", "c")])
    assert calm_down(Model(), alone, "ab").stepped[1].nodes == set("ab")


@pytest.mark.parametrize("first", [running(3, 1), running(5), cold(3)], ids=["3", "5", "cold"])
def test_from_wherever_chance_has_led_all_come_together(first):
    """Nobody has crashed or left for good: then nothing may keep them apart for ever."""
    for seed in range(60):
        state = wander(Model(Bounds(6, 6)), first, 60, seed)
        after = calm_down(Model(), state, names(first))
        assert after.stepped[1].nodes == names(first), f"after {seed}"


def test_a_cold_start_needs_a_majority_of_the_list():
    assert calm_down(Model(), cold(3), "ab").stepped[1].nodes == set("ab")
    assert calm_down(Model(), cold(3), "a").stepped[0] == -1
    assert calm_down(Model(), cold(3), "abc").stepped[0] == 0
