"""Agents that are killed and started again on their machines go on as the voters they were."""

from __future__ import annotations

from pathlib import Path

from tests.process.jobs import Job, job
from tests.support import poll_for


def newest_world(made: Job, after: int, size: int) -> int:
    """Wait for a later world whose workers have all started; its generation."""

    def begun() -> list[int]:
        starts = [one for one in made.lines(event="start") if one["world_size"] == size]
        later = {one["generation"] for one in starts if one["generation"] > after}
        return [g for g in later if sum(one["generation"] == g for one in starts) == size]

    try:
        return max(poll_for(begun, what=f"{size} workers after generation {after}", timeout=60))
    except AssertionError as error:
        raise AssertionError(f"{error}\n{made.said()}") from None


def test_two_of_three_agents_are_killed_and_started_again(tmp_path: Path) -> None:
    """First two that follow, then the host and another: each time one alone is no majority."""
    with job(tmp_path / "job", "--nnodes=3 --lease=2 --settle=60") as made:
        nodes = [made.start() for _ in range(3)]
        generation = newest_world(made, -1, 3)
        for lost in ((1, 2), (0, 1)):
            for index in lost:
                nodes[index].kill()
            for index in lost:
                nodes[index] = made.start()
            generation = newest_world(made, generation, 3)
        made.order("finish")
        assert [node.wait() for node in nodes] == [0, 0, 0], made.said()
    assert not list(tmp_path.rglob("voter")), "a closed job is not resumed"
