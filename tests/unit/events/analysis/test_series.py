from itertools import pairwise

import pytest

from tests.unit.events.stories import Story
from torchelastic.events import types as events
from torchelastic.events.analysis.series import METRICS_LIMIT, POINTS_LIMIT, Series
from torchelastic.events.analysis.view import StoredView, fold


def tell(story: Story, at: float, step: int, generation: int = 0, **more) -> Story:
    """Node a, or another, tells how far its lowest rank is and what the script has reported."""
    rank, by = more.pop("rank", 0), more.pop("by", "a")
    progress = events.Progress([rank], [step], [100 + at], metrics=more.pop("metrics", {}))
    return story.tell(at, progress, by=by, generation=generation)


# --- one curve -----------------------------------------------------------------------------------


def series_of(points, **more) -> Series:
    series = Series(**more)
    for point in points:
        series.add(point)
    return series


def test_few_points_are_all_kept():
    for count in (0, 1, 2, POINTS_LIMIT // 2 - 2):
        points = [(float(n), n, n % 7 / 7) for n in range(count)]
        assert list(series_of(points).points()) == points


@pytest.mark.parametrize("count", [POINTS_LIMIT - 1, POINTS_LIMIT, POINTS_LIMIT + 1, 12_345])
def test_a_long_curve_is_thinned_over_its_whole_length(count):
    points = series_of((float(n), n, float(n % 10)) for n in range(count)).points()
    times = [wall for wall, _, _ in points]
    assert POINTS_LIMIT // 4 <= len(points) <= POINTS_LIMIT
    assert times == sorted(set(times))
    assert times[0] < 10
    assert points[-1] == (count - 1, count - 1, float((count - 1) % 10))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert max(gaps) <= 16 * count / POINTS_LIMIT + 10


def test_a_spike_is_seen_however_long_ago():
    spikes = {123: 99.0, 4_000: -99.0}
    series = series_of((float(n), n, spikes.get(n, 1.0)) for n in range(20_000))
    assert {(123.0, 123, 99.0), (4000.0, 4000, -99.0)} <= set(series.points())


def test_a_small_curve_has_room_for_its_points():
    series = series_of(((float(n), n, float(n % 3)) for n in range(1000)), most=9)
    assert 2 <= len(series.points()) <= 9


# --- of a job ------------------------------------------------------------------------------------


def test_the_rate_is_zero_where_nobody_trains_and_the_step_rolls_back():
    story = Story().world(1, 0).trains(2, 0, 0)
    for second in range(3, 9):
        story.steps(second, 0, 10 * (second - 2))
    story.over(9, 0).steps(9.5, 0, 66, entered=8.9)  # the last word of a generation
    story.world(10, 1).trains(11, 1, 40)
    for second in range(12, 15):
        story.steps(second, 1, 40 + 5 * (second - 11))
    story.end(15)
    assert fold(story.records).rates == (
        *((1003.0 + n, 10 * (n + 1), 10.0) for n in range(6)),
        (1009.0, 60, 0.0),
        *((1012.0 + n, 45 + 5 * n, 5.0) for n in range(3)),
        (1015.0, 55, 0.0),
    )


def test_a_script_without_steps_has_metrics_alone():
    view = fold(Story().world(1, 0).records)
    assert (view.rates, view.metrics) == ((), {})
    story = tell(Story().world(1, 0), 2, -1, metrics={"loss": 2.0})
    view = fold(story.records)
    assert (view.rates, view.metrics) == ((), {"loss": ((1002.0, None, 2.0),)})


def test_a_metric_is_that_of_the_lowest_rank_that_reports_it():
    story = Story().world(1, 0)
    tell(story, 2, 1, metrics={"loss": 9.0, "accuracy": 0.5}, rank=1, by="b")
    tell(story, 3, 1, metrics={"loss": 3.0})
    tell(story, 4, 2, metrics={"loss": 8.0, "accuracy": 0.6}, rank=1, by="b")
    tell(story, 5, 3, metrics={"loss": 2.0})
    assert fold(story.records).metrics == {
        "loss": ((1002.0, 1, 9.0), (1003.0, 1, 3.0), (1005.0, 3, 2.0)),
        "accuracy": ((1002.0, 1, 0.5), (1004.0, 2, 0.6)),
    }


def test_another_node_goes_on_with_a_metric_in_the_next_world():
    story = tell(Story().world(1, 0), 2, 5, metrics={"loss": 3.0})
    story.over(3, 0).world(4, 1, "b")
    tell(story, 5, 3, generation=1, metrics={"loss": 3.5}, rank=1, by="b")
    assert fold(story.records).metrics == {"loss": ((1002.0, 5, 3.0), (1005.0, 3, 3.5))}


def test_the_last_value_of_each_metric_is_at_hand_though_only_what_is_finite_is_drawn():
    story = tell(Story().world(1, 0), 2, 5, metrics={"loss": 3.0, "lr": 0.1})
    tell(story, 3, 6, metrics={"loss": None})
    view = fold(story.records)
    assert view.metrics == {"loss": ((1002.0, 5, 3.0),), "lr": ((1002.0, 5, 0.1),)}
    assert view.reported == {"loss": None, "lr": 0.1}


def test_samples_are_those_of_the_lowest_ranks_and_go_back_with_the_steps():
    story = Story().world(1, 0)
    for at, samples, by, rank in [(2, 64, "a", 0), (3, 96, "b", 1), (4, -1, "a", 0)]:
        progress = events.Progress([rank], [at], [100.0 + at], samples=samples)
        story.tell(at, progress, by=by, generation=0)
    assert fold(story.records).samples == 64
    story.over(5, 0).world(6, 1)
    story.tell(7, events.Progress([0], [1], [107.0], samples=32), generation=1)
    assert fold(story.records).samples == 32


def test_the_last_checkpoint_in_storage_is_known_with_when_it_was():
    story = Story().world(1, 0)
    assert fold(story.records).checkpoint is None
    for at, step in ((5, 40), (9, 80)):
        stored = events.CheckpointStored(0, step, at=100.0 + at - 1, seconds=0.5, size=1000)
        story.tell(at, stored, generation=0)
    expected = StoredView(wall=1008.0, step=80, seconds=0.5, size=1000)
    assert fold(story.records).checkpoint == expected


def test_names_are_few():
    names = {f"name-{n}": float(n) for n in range(METRICS_LIMIT + 5)}
    view = fold(tell(Story().world(1, 0), 2, 5, metrics=names).records)
    assert list(view.metrics) == list(names)[:METRICS_LIMIT]
