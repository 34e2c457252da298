"""The stories in `tests/stories` are what the product does: the simulation tells them anew."""

from __future__ import annotations

import pytest

from tests.simulation import stories

PATHS = sorted(stories.FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_story_is_told_by_the_product(path):
    """`python -m tests.simulation.stories --rewrite` writes what has changed: read the diff."""
    told = stories.told(path)
    assert told == path.read_text(), f"{path.name} has changed: see tests/simulation/stories.py"
    assert told.endswith("no law is broken\n")


def test_stories_show_each_kind_of_job():
    schedules = [stories.schedule_of(path.read_text())[0] for path in PATHS]
    assert len(PATHS) == 10
    assert {schedule.resident for schedule in schedules} == {True, False}
    assert {schedule.etcd for schedule in schedules} == {True, False}


def test_story_of_broken_law_says_so(monkeypatch):
    """A story is no proof, but it may not hide that a law is broken."""
    monkeypatch.setattr(stories.JobSimulation, "run", lambda simulation, until: ["law 1, at 3 s"])
    schedule, since, until = stories.schedule_of(PATHS[0].read_text())
    assert [*stories.Story(schedule).tell(since, until)][-1].endswith("law 1, at 3 s")
