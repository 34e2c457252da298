"""The checker of the laws: what breaks each of them is named, and what is in order is not."""

from __future__ import annotations

import pytest

from torchelastic.chaos.laws import (
    AgentEnded,
    ClosedJob,
    Event,
    JobDisturbed,
    LawElectorate,
    Laws,
    LeaseOpened,
    LeaseOver,
    NodeDown,
    NodeFailed,
    NodeFrozen,
    NodeLeaves,
    NodeThawed,
    NodeUp,
    PathCut,
    PathRestored,
    Rules,
    StateForgotten,
    StepFinished,
    WorkerEntered,
    WorkersBegan,
    WorldConfirmed,
    WorldPublished,
    check,
)

RULES = Rules(min_nodes=2, within=5.0, endures=10, together=1.0)
ABC = frozenset("abc")
THREE = LawElectorate(ABC, "a")


def job(nodes: str = "abc", host: str = "a") -> list[Event]:
    """Generation 0 of these nodes has made step 0, at 1.0 s."""
    every = frozenset(nodes)
    events: list[Event] = [NodeUp(0.0, node) for node in sorted(every)]
    events.append(WorldPublished(0.5, 0, host, every, (LawElectorate(every, host),)))
    return [*events, *begins(0.5, nodes, 0, 0), *steps(1.0, nodes, 0, 0)]


def begins(at: float, nodes: str, generation: int, step: int) -> list[Event]:
    return [WorkersBegan(at, node, generation, step) for node in nodes]


def steps(at: float, nodes: str, generation: int, step: int) -> list[Event]:
    return [StepFinished(at, node, generation, step) for node in nodes]


def following(nodes: str, step: int = 1) -> list[Event]:
    """Generation 1 of these nodes begins with a step, and makes it, at 2.0 s."""
    formed = WorldPublished(
        1.5, 1, "a", frozenset(nodes), (THREE, LawElectorate(frozenset(nodes), "a"))
    )
    return [formed, *begins(1.5, nodes, 1, step), *steps(2.0, nodes, 1, step)]


QUIET = JobDisturbed(20.0, "the end")
PAIRS_OF_C = [(one, other) for one in "ab" for other in ("c",)]


def cut_off(at: float, kind: type[PathCut] | type[PathRestored] = PathCut) -> list[Event]:
    """Node c from the others, both ways."""
    return [kind(at, *pair) for one, two in PAIRS_OF_C for pair in ((one, two), (two, one))]


IN_ORDER = {
    "a job that trains": job(),
    "another world": [*job(), *following("ab")],
    "who leaves finishes the agreed step after the others' next one": [
        *job()[:-1],
        *following("ab"),
        *steps(2.1, "c", 0, 0),
    ],
    "nobody has the last step any more": [
        *job(),
        *(StateForgotten(1.2, node) for node in "abc"),
        *following("ab", step=0),
    ],
    "who has the last step is out of reach": [
        *job(),
        *cut_off(1.1),
        StateForgotten(1.2, "a"),
        StateForgotten(1.2, "b"),
        *following("ab", step=0),
    ],
    "too few are left": [*job(), NodeDown(2.0, "b"), NodeDown(2.0, "c"), QUIET],
    "no majority is left": [*job("abcde"), *(NodeDown(2.0, node) for node in "abc"), QUIET],
    "a majority is frozen": [*job(), NodeFrozen(2.0, "b"), NodeFrozen(2.0, "c"), QUIET],
    "they cannot all talk": [*job(), PathCut(2.0, "a", "b"), QUIET],
    "the last electorate is confirmed, the one before is gone": [
        *job("abcde"),
        WorldPublished(1.5, 1, "a", frozenset("abcde"), (LawElectorate(frozenset("uvw")),)),
        QUIET,
    ],
    "it trains again in time": [
        *job(),
        NodeDown(2.0, "c"),
        *following("ab"),
        JobDisturbed(6.5, ""),
    ],
    "it is closed": [*job(), ClosedJob(2.0, 0, 0, "every worker succeeded"), QUIET],
    "it has failed too often": [
        *job(),
        *(NodeFailed(1.1, "b", 0) for _ in range(10)),
        ClosedJob(2.0, 0, 1, "the budget is spent", "b"),
    ],
    "of two, the host is gone": [*job("ab"), NodeDown(2.0, "a"), NodeUp(2.0, "c"), QUIET],
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_laws_allow_history_in_order(name):
    assert check(IN_ORDER[name], RULES) == []


@pytest.mark.parametrize(
    ("law", "said", "events"),
    [
        (1, "after a step of generation 1", [*job(), *following("ab"), *steps(3.0, "c", 0, 1)]),
        (
            1,
            "step 0 of generation 0 on c, after a step of generation 1",
            [*job()[:-1], *following("ab", step=0), *steps(2.1, "c", 0, 0)],
        ),
        (2, "generation 0 is both", [*job(), WorldPublished(2.0, 0, "c", ABC)]),
        (2, "generation 0 is both", [*job(), WorldPublished(2.0, 0, "a", frozenset("ab"))]),
        (
            2,
            "b begins generation 0 after 1",
            [*job(), *following("ab"), WorkersBegan(3.0, "b", 0, 1)],
        ),
        (
            3,
            "c has it",
            [*job(), StateForgotten(1.2, "a"), StateForgotten(1.2, "b"), *following("ab", step=0)],
        ),
        (7, "does not say why", [*job(), AgentEnded(2.0, "b", "", asked=True)]),
        (7, "without a reason", [*job(), ClosedJob(2.0, 0, 0, "")]),
        (
            7,
            "c is blamed, but b failed first",
            [
                *job(),
                NodeFailed(1.1, "b", 0),
                NodeFailed(3.0, "c", 0),
                ClosedJob(3.0, 0, 1, "so", "c"),
            ],
        ),
        (8, "b has ended unasked", [*job(), AgentEnded(2.0, "b", "it cannot", asked=False)]),
        (8, "given up", [*job(), NodeFailed(1.1, "b", 0), ClosedJob(2.0, 0, 1, "no more", "b")]),
        (8, "no step was made", [*job(), QUIET]),
        (8, "no step was made", [*job(), NodeDown(2.0, "a"), QUIET]),
        (8, "no step was made", [*job(), *cut_off(2.0), QUIET]),
        (8, "no step was made", [*job(), *cut_off(2.0), *cut_off(9.0, PathRestored), QUIET]),
        (8, "no step was made", [*job(), NodeFrozen(2.0, "b"), NodeThawed(9.0, "b"), QUIET]),
        (8, "no step was made", [*job("ab"), NodeDown(2.0, "b"), NodeUp(2.0, "c"), QUIET]),
        (
            8,
            "no step was made",
            [
                *job("abcde"),
                WorldPublished(1.5, 1, "a", ABC, (LawElectorate(frozenset("uvw")), THREE)),
                WorldConfirmed(1.6, 1),
                QUIET,
            ],
        ),
    ],
)
def test_laws_name_event_that_breaks_one(law, said, events):
    found = check(events, RULES)
    assert any(one.law == law and said in one.sentence for one in found), found


def test_laws_allow_as_many_repeated_steps_as_the_rules():
    events = [*job(), *steps(1.1, "abc", 0, 1), *following("ab", step=1)]
    assert check(events, Rules(redone=1)) == []
    assert {one.law for one in check(events, Rules())} == {3}


def test_laws_need_founders_before_the_first_world():
    founders = [LawElectorate(frozenset("a"))]
    laws = Laws(Rules(min_nodes=1, within=5.0, founders=founders))
    laws.note(NodeUp(0.0, "b"))
    laws.look(9.0)
    assert laws.violations == []
    laws.note(NodeUp(9.0, "a"))
    laws.look(15.0)
    assert [str(one) for one in laws.violations] == [
        "law 8, at 15.000 s: the job could train since 9.000 s, and no step was made"
    ]


@pytest.mark.parametrize(
    ("more", "laws"),
    [
        ([], [8]),  # a said goodbye, c is there
        ([NodeFrozen(2.0, "a")], []),  # it could not say so, and one of three is no majority
    ],
)
def test_laws_count_vote_of_leaver_that_is_reached(more, laws):
    rules = Rules(min_nodes=1, within=5.0)
    events = [*job(), NodeDown(1.5, "b"), NodeLeaves(2.0, "a"), *more]
    assert [one.law for one in check([*events, JobDisturbed(9.0, "")], rules)] == laws


@pytest.mark.parametrize(
    ("rank", "size", "sentence"),
    [
        (3, 4, ""),
        (2, 4, "has coordinate 1, and is rank 2 of generation 0"),
        (1, 3, "3 workers are not whole replicas of 2"),
    ],
)
def test_a_world_has_whole_replicas_and_a_worker_keeps_its_coordinate(rank, size, sentence):
    rules = Rules(replica=2, workers=2)
    found = check([WorkerEntered(1.0, "a", "worker 1 of a", 1, 0, rank, size)], rules)
    assert [one.law for one in found] == [9] * bool(sentence)
    assert all(sentence in one.sentence for one in found)


@pytest.mark.parametrize(("forgotten", "laws"), [((), [3]), ((1,), [])])
def test_a_step_may_be_repeated_once_no_whole_replica_has_it(forgotten, laws):
    formed = WorldPublished(0.5, 0, "a", frozenset("a"))
    both = (0, 1)
    events = [
        formed,
        WorkersBegan(0.5, "a", 0, 0, both),
        StepFinished(1.0, "a", 0, 0, both),
        StateForgotten(1.5, "a", forgotten),
        WorldPublished(2.0, 1, "a", frozenset("a")),
        WorkersBegan(2.0, "a", 1, 0, both),
    ]
    assert [one.law for one in check(events, Rules(replica=2, workers=2))] == laws


@pytest.mark.parametrize(
    ("meanwhile", "laws"),
    [
        ([], [3]),
        ([NodeFrozen(1.2, "c")], [3]),
        ([LeaseOver(1.2, "c")], []),
        ([NodeDown(1.2, "c")], []),
        ([LeaseOver(1.2, "c"), LeaseOpened(1.3, "c")], [3]),
    ],
    ids=["cut off", "frozen", "lease ended", "down", "lease opened again"],
)
def test_with_an_arbiter_a_node_has_its_copy_while_its_lease_is_alive(meanwhile, laws):
    """Nodes a and b, which do not reach c, begin again without the step that only c still has."""
    leases = [LeaseOpened(0.0, node) for node in "abc"]
    lost = [StateForgotten(1.2, node) for node in "ab"]
    events = [*leases, *job(), *cut_off(1.1), *lost, *meanwhile, *following("ab", step=0)]
    assert [one.law for one in check(events, Rules(arbiter=True))][:1] == laws


def test_with_an_arbiter_the_lease_counts_when_the_world_is_published():
    """Node c is back too late: the world without its step has been published."""
    leases = [LeaseOpened(0.0, node) for node in "abc"]
    lost = [StateForgotten(1.2, node) for node in "ab"]
    published, *others = following("ab", step=0)
    events = [*leases, *job(), *lost, LeaseOver(1.2, "c"), published, LeaseOpened(1.5, "c")]
    assert check([*events, *others], Rules(arbiter=True)) == []


@pytest.mark.parametrize(("more", "laws"), [([], []), ([LeaseOver(3.0, "c")], [8])])
def test_with_an_arbiter_nodes_without_the_state_wait_for_its_holders(more, laws):
    leases = [LeaseOpened(0.0, node) for node in "abc"]
    lost = [StateForgotten(1.2, node) for node in "ab"]
    events = [*leases, *job(), *cut_off(1.1), *lost, *more, JobDisturbed(9.0, "")]
    rules = Rules(min_nodes=2, within=5.0, arbiter=True)
    assert [one.law for one in check(events, rules)] == laws


@pytest.mark.parametrize(("cut", "laws"), [((), [8]), ((("a", "b"), ("b", "a")), [])])
def test_with_an_arbiter_a_node_need_not_train_beside_a_larger_group_with_a_cut(cut, laws):
    """Node c is cut off; the others train, or would if all of them reached each other."""
    every = frozenset("abcd")
    world = [*(NodeUp(0.0, node) for node in sorted(every)), WorldPublished(0.5, 0, "", every)]
    alone = [PathCut(1.0, *pair) for one in "abd" for pair in ((one, "c"), ("c", one))]
    inside = [PathCut(1.0, *pair) for pair in cut]
    rules = Rules(min_nodes=1, within=5.0, arbiter=True)
    assert [
        one.law for one in check([*world, *alone, *inside, JobDisturbed(9.0, "")], rules)
    ] == laws
