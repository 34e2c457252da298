"""Errors beside the loop are told; ends are not waited for without end."""

from __future__ import annotations

import asyncio

from torchelastic.agent.side_tasks import SideTasks


def play(*works, cancel=False):
    """What is told of these, and the tasks."""
    told = []

    async def run():
        beside = SideTasks(told.append)
        tasks = [beside.start(work, "work") for work in works]
        if cancel:
            await asyncio.sleep(0)
            await beside.cancel()
        else:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)
        return tasks

    return told, asyncio.run(run())


async def fails():
    raise ValueError("no")


async def succeeds():
    return 3


async def for_ever():
    await asyncio.Event().wait()


async def fails_at_its_end():
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("no")


def test_an_error_is_told_and_nothing_else():
    told, (_, task) = play(fails(), succeeds())
    assert [str(error) for error in told] == ["no"]
    assert task.result() == 3


def test_who_is_cancelled_has_not_failed():
    told, tasks = play(for_ever(), for_ever(), cancel=True)
    assert told == []
    assert all(task.cancelled() for task in tasks)


def test_all_are_ended_though_one_fails_at_that():
    told, tasks = play(fails_at_its_end(), for_ever(), cancel=True)
    assert [str(error) for error in told] == ["no"]
    assert all(task.done() for task in tasks)
