"""What is found out of a hang is told once; and who only looks ends nothing."""

from tests.unit.agent.support import in_loop
from torchelastic.agent.watch.hang_watchdog import HangReport
from torchelastic.agent.watch.inspector import WorldActivity
from torchelastic.events.analysis.hangs import RankActivity

FOUND = WorldActivity(3, (RankActivity(rank=0, node="a", stack="x"),))


def report_of(*seen):
    """A report that finds these, one after the other, or raises them; what it tells; its looks."""
    told, left = [], list(seen)

    async def look():
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return HangReport(look, lambda generation, event: told.append(generation)), told, left


@in_loop
async def test_it_is_looked_once_and_told_once():
    report, told, left = report_of(FOUND, FOUND)
    for _ in range(2):
        report.tell(await report.found(3))
    report.close()
    assert (left, told) == ([FOUND], [3])


@in_loop
async def test_what_was_seen_of_the_world_before_does_not_count():
    report, _, _ = report_of(FOUND, WorldActivity(4))
    assert (await report.found(3), await report.found(4)) == (FOUND, WorldActivity(4))


@in_loop
async def test_an_error_in_looking_is_logged_and_nothing_is_reported(caplog):
    report, told, _ = report_of(RecursionError("too deep"))
    found = await report.found(0)
    report.tell(found)
    assert (found, told) == (WorldActivity(), [])
    assert "Could not find out" in caplog.text
    assert "too deep" in caplog.text
