"""Bad steps: one for all ranks' reports, and undone when a later generation goes back behind it."""

import pytest

from tests.unit.events.stories import Story
from torchelastic.events import types as events
from torchelastic.events.analysis.bad_steps import BadSteps, skipped_samples
from torchelastic.events.words import bad_step


def told(story, at, step, *, action="skip", generation=0, origin=1, spans=((3, 7),), **more):
    """Two ranks report a step; the samples of rank 1 are ten further."""
    for rank in range(2):
        samples = [
            {
                "epoch": 0,
                "ids": [one + 10 * rank for one in ids],
                "size": 2,
                "span": [20 * place, 20 * place + 2 * len(ids)],
            }
            for place, ids in enumerate(spans)
        ]
        bad = events.StepSkipped(
            rank,
            step,
            "the gradient is not finite",
            "nan",
            0.5,
            0.0,
            rank == origin,
            action,
            samples,
            more.get("micro_batches", []),
        )
        story.tell(at, bad, generation=generation)
    return story


def steps_of(story):
    fold = BadSteps()
    for record in story.records:
        fold.feed(record)
    return fold


LATER = {
    "one that trains from the step": (lambda story: story.trains(3, 1, step=20), False),
    "one that trains from the step before": (lambda story: story.trains(3, 1, step=19), True),
    "a script seen at the step": (lambda story: story.steps(3, 1, 20), False),
    "a script seen at an earlier step": (lambda story: story.steps(3, 1, 12), True),
    "one that judges the step again": (lambda story: told(story, 3, 20, generation=1), True),
    "a late report of the same": (lambda story: story.trains(3, 0, step=12), False),
}


@pytest.mark.parametrize("later", LATER)
def test_bad_step_is_undone_by_generation_that_begins_before_it(later):
    happens, undone = LATER[later]
    story = happens(told(Story().world(0, 0).trains(1, 0, step=0), 2, 20).world(2.5, 1))
    fold = steps_of(story)
    assert fold.views[0].undone is undone
    skipped = [(one.step, one.id) for one in skipped_samples(story.records).samples]
    again = later == "one that judges the step again"
    assert skipped == ([] if undone and not again else [(20, 3), (20, 7), (20, 13), (20, 17)])


def test_bad_step_has_the_reports_of_all_ranks():
    story = told(Story(), 1, 20, action="retry")
    fold = steps_of(told(story, 2, 20, spans=((3,), (7, 0))))
    assert fold.total == 1
    assert [bad_step(one) for one in fold.views] == [
        "step 20 is repeated: the gradient is not finite (norm nan, loss 0.5) on rank 1, "
        "samples 13, 17",
        "step 20 is skipped: the gradient is not finite (norm nan, loss 0.5) on rank 1, "
        "samples 13, 17, 10",
    ]
    assert fold.views[1].samples == 6
    assert {
        (one.epoch, one.rank, one.origin) for one in skipped_samples(story.records).samples
    } == {
        (0, 0, False),
        (0, 1, True),
    }


def test_bad_step_of_no_rank_and_of_micro_batches_in_words():
    (alone,) = steps_of(told(Story(), 1, 20, origin=None)).views
    assert bad_step(alone).endswith(" of all ranks together, 4 samples")
    (exact,) = steps_of(told(Story(), 1, 20, micro_batches=[5])).views
    assert bad_step(exact).endswith(" on rank 1 (micro-batch 5), samples 13, 17")


def test_bad_steps_beyond_the_limit_are_counted():
    story = Story()
    for step in range(1, 31):
        told(story, step, step)
    fold = steps_of(story)
    assert (fold.total, [one.step for one in fold.views]) == (30, list(range(11, 31)))


def test_skipped_samples_are_listed_once_and_missing_ones_counted():
    """Rank 1 has the samples of rank 0, whose replica it belongs to; rank 2 is on another node."""
    story = Story()
    for rank, ids in ((0, [3, 7]), (1, [3, 7])):
        samples = [{"epoch": 0, "ids": ids, "size": 2, "span": [0, 4]}]
        bad = events.StepSkipped(rank, 5, "bad", "inf", None, 0.0, rank == 1, "skip", samples)
        story.tell(1, bad, generation=0)
    skipped = skipped_samples(story.records)
    assert [(one.id, one.rank, one.origin) for one in skipped.samples] == [
        (3, 1, True),
        (7, 1, True),
    ]
    assert skipped.missing == 2
