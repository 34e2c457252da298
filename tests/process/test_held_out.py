"""A join must not destroy a healthy job."""

from __future__ import annotations

from tests.process.jobs import job
from tests.support import poll_for


def test_a_job_goes_on_without_a_node_with_which_it_cannot_start(tmp_path):
    """A script that raises at start-up where there are more workers than in its first world."""
    flags = "--nnodes=1:2 --nproc-per-node=1 --settle=0.1 --max-restarts=0"
    with job(tmp_path / "job", flags) as made:
        made.order("train 1")
        first = made.start()
        poll_for(lambda: made.lines(event="step", generation=0), what="a step", timeout=60)
        second = made.start()
        poll_for(lambda: made.lines(event="step", generation=2), what="a step later", timeout=60)
        (third,) = [one for one in first.events("world-formed") if one["generation"] == 2]
        waits = "this node is a spare, held out for 60 s"
        poll_for(lambda: waits in second.stderr, what="the other says so", timeout=60)
        made.order("finish")
        assert first.wait() == 0, made.said()
        assert second.wait() == 0, made.said()
    assert (third["size"], len(third["spares"]), third["restarts_used"]) == (1, 1, 0)
    (newcomer,) = third["spares"]
    assert third["held"][newcomer].startswith("held out for 60 s: generation 1 with ")
    assert third["reason"].startswith(
        f"generation 1 with {newcomer} failed before its first step: rank "
    )
    assert third["reason"].endswith(
        f"ValueError: the batch cannot be split over 2; continuing without {newcomer} for 60 s"
    )
