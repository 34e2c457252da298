"""Stragglers: named after a few steps with what they cost, and forgotten when it is over."""

from collections.abc import Callable, Sequence

import pytest

from torchelastic.events.analysis.stragglers import StragglerReport, Stragglers
from torchelastic.events.types import Progress

#: Seconds of a rank's own in a step.
Own = Callable[[int], float]


class Job:
    """Workers that go in step, each on a node of its own, and what is found of them."""

    def __init__(self, *own: Own | float, threshold: float = 1.5, generation: int = 0) -> None:
        self.own: list[Own] = [_always(one) if isinstance(one, float) else one for one in own]
        self.watch = Stragglers(threshold)
        self.watch.turn_to(generation, len(own))
        self.generation, self.step, self.at = generation, 0, 0.0
        self.spent = [0.0] * len(own)
        self.found: list[StragglerReport] = []

    def rounds(self, count: int, steps: int = 10, *, silent: Sequence[int] = ()) -> "Job":
        """So many looks at all workers, so many steps apart."""
        for _ in range(count):
            for _ in range(steps):
                took = [own(self.step) for own in self.own]
                self.spent = [sum(pair) for pair in zip(self.spent, took, strict=True)]
                self.at += max(took) + 0.01
                self.step += 1
            for rank in range(len(self.own)):
                if rank not in silent:
                    self.tell(rank)
        return self

    def tell(self, rank: int) -> None:
        told = Progress([rank], [self.step], [self.at], own=[self.spent[rank]])
        self.found += self.watch.feed(self.generation, f"node-{rank}", told)

    @property
    def said(self) -> list[tuple[int, bool]]:
        """Who, and whether it is over."""
        return [(one.rank, one.over) for one in self.found]


def _always(own: float) -> Own:
    return lambda step: own


def test_slow_rank_that_blocks_no_other_is_no_straggler():
    """Ranks that train each for itself."""
    watch, found = Stragglers(1.5), []
    watch.turn_to(0, 2)
    for look in range(1, 20):
        steps, at = [20 * look, 10 * look], [float(look)] * 2
        found += watch.feed(0, "a", Progress([0, 1], steps, at, own=at))
    assert found == []


def slow_between(first: int, last: int, *, own: float = 0.1, slow: float = 0.3) -> Own:
    return lambda step: slow if first <= step < last else own


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((0.1, 0.1, 0.1), []),
        ((0.1, 0.3, 0.1), [1]),
        ((0.3, 0.1, 0.1, 0.1), [0]),
        # Half of all: they are compared with the other half, whoever is in the middle.
        ((0.1, 0.3), [1]),
        ((0.3, 0.1, 0.3, 0.1), [0, 2]),
        # Most of them: that is how it is.
        ((0.1, 0.3, 0.3), []),
        # Not slow enough.
        ((0.1, 0.14, 0.1), []),
        # By little, or by a little of the step.
        ((0.001, 0.0025, 0.001), []),
        ((0.1, 0.1, 0.1, 2.0, 0.16), [3]),
        ((0.0, 0.1, 0.0), [1]),
        ((0.3,), []),
    ],
)
def test_straggler_is_the_rank_slower_than_the_median(own, expected):
    assert Job(*own).rounds(5).said == [(rank, False) for rank in expected]


def test_straggler_is_reported_after_three_rounds_with_its_cost():
    job = Job(0.1, 0.3, 0.1).rounds(4)
    assert job.found == [], "the first look does not count, the second is where counting begins"
    (found,) = job.rounds(1).found
    assert (found.rank, found.node, found.step) == (1, "node-1", 50)
    assert (found.pace, found.usual) == (pytest.approx(0.3), pytest.approx(0.1))
    assert found.cost == found.lost == pytest.approx(30 * 0.2)
    event = found.event("b")
    assert event.text == (
        "rank 1 on b is slow: 300 ms per step without waiting, median 100 ms; "
        "the others have waited 6.0 s for it so far"
    )
    assert (event.rank, event.name, event.over) == (1, "b", False)


@pytest.mark.parametrize(("steps", "rounds"), [(1, 5), (2, 3), (100, 3)])
def test_straggler_needs_three_looks_and_five_steps(steps, rounds):
    job = Job(0.1, 0.3, 0.1)
    job.rounds(4, 1)  # what does not count
    assert job.rounds(rounds - 1, steps).said == []
    assert job.rounds(1, steps).said == [(1, False)]


def test_a_threshold_of_its_own():
    assert Job(0.1, 0.14, 0.1, threshold=1.2).rounds(5).said == [(1, False)]
    assert Job(0.1, 0.3, 0.1, threshold=4.0).rounds(5).said == []


@pytest.mark.parametrize(
    ("own", "steps"),
    [
        (slow_between(15, 16, slow=60.0), 10),
        (slow_between(25, 26, slow=60.0), 10),
        (slow_between(45, 46, slow=60.0), 10),
        (slow_between(0, 3, slow=60.0), 1),
        (lambda step: 0.3 if step // 20 % 2 else 0.1, 10),
    ],
    ids=["one step", "a later one", "one later still", "the warm-up", "now and then"],
)
def test_a_long_step_the_warm_up_and_slowness_now_and_then_make_nobody_a_straggler(own, steps):
    assert Job(own, 0.1, 0.1).rounds(20, steps).said == []


def test_when_it_is_over_it_is_reported_and_forgotten():
    job = Job(0.1, slow_between(0, 70), 0.1).rounds(10)
    assert job.said == [(1, False), (1, True)]
    assert job.watch.named == {}
    over = job.found[-1]
    assert over.cost == over.lost == pytest.approx(50 * 0.2)
    assert over.event("b").text == "rank 1 on b keeps up again; the others have waited 10 s for it"
    assert job.rounds(10).said == [(1, False), (1, True)]


def test_slow_again_is_named_again_and_what_was_lost_is_added_up():
    job = Job(0.1, lambda step: 0.3 if step < 70 or step >= 110 else 0.1, 0.1).rounds(14)
    assert job.said == [(1, False), (1, True), (1, False)]
    assert not any(found.again for found in job.found)
    assert job.found[-1].cost == pytest.approx(30 * 0.2)
    assert job.found[-1].lost == pytest.approx(80 * 0.2)


def test_straggler_is_reported_again_when_its_cost_doubles():
    job = Job(0.25, 0.75, 0.25).rounds(31)
    assert [found.cost for found in job.found] == [rounds * 5.0 for rounds in (3, 6, 12, 24)]
    assert [found.again for found in job.found] == [False, True, True, True]


def test_straggler_total_cost_is_reported_once_at_generation_end():
    job = Job(0.25, 0.75, 0.25).rounds(11)
    assert [found.cost for found in job.found] == [15.0, 30.0]
    (last,) = job.watch.sum_up()
    assert (last.cost, last.lost, last.again, last.over) == (45.0, 45.0, True, False)
    assert last.event("b").text == (
        "rank 1 on b stayed slow until the generation ended: 750 ms per step without waiting, "
        "median 250 ms; the others have waited 45 s for it"
    )
    assert job.watch.sum_up() == [], "nothing is new"


def test_nothing_is_summed_up_where_all_is_reported():
    assert Job(0.25, 0.75, 0.25).rounds(5).watch.sum_up() == []
    assert Job(0.25, 0.75, 0.25).rounds(4).watch.sum_up() == [], "it was not named"
    job = Job(0.1, slow_between(0, 70), 0.1).rounds(10)
    assert job.said[-1] == (1, True)
    assert job.watch.sum_up() == [], "it is over"


def test_straggler_faster_only_lately_counts_to_the_end():
    (last,) = Job(0.25, slow_between(0, 70, slow=0.75), 0.25).rounds(8).watch.sum_up()
    assert (last.cost, last.over) == (pytest.approx(25.0), False)


def test_straggler_is_reported_again_when_much_slower():
    job = Job(0.1, lambda step: 0.3 if step < 60 else 3.0, 0.1).rounds(6)
    assert len(job.found) == 1
    job.rounds(1)
    assert len(job.found) == 2
    assert job.found[-1].excess > 2 * job.found[0].excess


def test_lost_time_is_the_cost_of_the_slowest_straggler():
    job = Job(0.25, 0.75, 1.25, 0.25, 0.25).rounds(5)
    assert [found.cost for found in job.found] == [15.0, 30.0]
    assert [found.lost for found in job.found] == [30.0, 30.0]


def test_a_world_is_judged_again():
    job = Job(0.1, 0.3, 0.1).rounds(5)
    assert set(job.watch.named) == {1}
    job.watch.turn_to(1, 3)
    assert job.watch.named == {}
    job.rounds(10)
    assert len(job.found) == 1, "what is told of the old generation counts no more"


def test_a_node_that_cannot_tell_does_not_hide_another():
    job = Job(0.1, 0.3, 0.1, 0.1).rounds(2)
    assert job.rounds(20, silent=[3]).said[0] == (1, False)
    # but half of them are too few to judge by
    assert Job(0.1, 0.3, 0.1, 0.1).rounds(1).rounds(40, silent=[2, 3]).said == []


def test_nodes_that_are_heard_late_and_all_at_once_are_compared_over_the_same_steps():
    """A new leader is told what one node has to say, and then what the next has."""
    job = Job(0.1, 0.3)
    histories: list[list[Progress]] = [[], []]
    for _ in range(20):
        job.rounds(1, silent=[0, 1])
        for rank, history in enumerate(histories):
            history.append(Progress([rank], [job.step], [job.at], own=[job.spent[rank]]))
    found = [
        finding
        for rank, history in enumerate(histories)
        for told in history
        for finding in job.watch.feed(0, f"node-{rank}", told)
    ]
    assert found == [], "one round"
    assert job.rounds(2).said == [(1, False)]


def test_rank_without_steps_or_own_time_is_not_judged():
    watch = Stragglers(1.5)
    watch.turn_to(0, 2)
    for step in range(100):
        assert watch.feed(0, "a", Progress([0], [-1], [0.0], own=[0.0])) == []
        assert watch.feed(0, "b", Progress([1], [step], [float(step)])) == []


def test_workers_of_one_node_are_compared_with_each_other():
    watch = Stragglers(1.5)
    watch.turn_to(0, 2)
    found = []
    for look in range(1, 6):
        own = [look * 1.0, look * 4.0]
        found += watch.feed(0, "a", Progress([0, 1], [look * 10] * 2, [look * 4.0] * 2, own=own))
    assert [(one.rank, one.node) for one in found] == [(1, "a")]
