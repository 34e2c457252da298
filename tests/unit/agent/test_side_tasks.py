"""Failures beside the training: they cost the node, a restart, or nothing."""

import asyncio
import logging
from pathlib import Path

import pytest

from torchelastic import best_effort, side_tasks
from torchelastic.best_effort import observing, quiet
from torchelastic.side_tasks import BEST_EFFORT, ESSENTIAL, POLICY, RESTARTABLE, SideTasks, TaskSet

PACKAGE = Path(side_tasks.__file__).parent


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """No test waits; what would be waited for."""
    waited = []

    async def pause(seconds):
        waited.append(seconds)
        await really(0)

    really = asyncio.sleep
    monkeypatch.setattr(side_tasks.asyncio, "sleep", pause)
    return waited


def play(*works, cancel=False):
    """The error that ended the node, the messages, and the tasks."""
    fatal, said = [], []

    async def run():
        beside = SideTasks(fatal.append, said.append)
        tasks = [beside.start(work, name) for work, name in works]
        if cancel:
            await asyncio.sleep(0)
            await beside.cancel()
        else:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)
        return tasks

    tasks = asyncio.run(run())
    return [str(error) for error in fatal], said, tasks


def failing(times):
    """Fails so many times, then returns how often it was started."""
    started = []

    async def work():
        started.append(1)
        if len(started) <= times:
            raise ValueError(f"failure {len(started)}")
        return len(started)

    return work


async def for_ever():
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("name", "failures", "fatal", "started"),
    [
        ("join", 0, [], 1),
        ("join", 1, ["failure 1"], 1),
        ("sampling", 0, [], 1),
        ("sampling", 1, [], 2),
        ("sampling", 50, [], 51),
        ("store-host", 5, [], 6),
        ("store-host", 6, ["store-host failed 6 times in a row, and this node cannot train"], 6),
    ],
)
def test_failed_task_is_restarted_or_ends_node_by_policy(name, failures, fatal, started):
    told, said, [task] = play((failing(failures), name))
    assert [text[: len(begin)] for text, begin in zip(told, fatal, strict=True)] == fatal
    assert (fatal or task.result()) == (fatal or started)
    assert len(said) == (failures > 0 and POLICY[name] != ESSENTIAL), "it is said once"


def test_a_task_that_fails_again_waits_longer(pauses):
    play((failing(9), "sampling"))
    assert [seconds for seconds in pauses if seconds] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_task_that_has_run_for_a_while_begins_again(pauses, monkeypatch):
    monkeypatch.setattr(side_tasks, "STEADY", -1.0)
    told, _, _ = play((failing(7), "store-host"))
    assert told == []
    assert [seconds for seconds in pauses if seconds] == [1] * 7


def test_cancelled_task_has_not_failed():
    told, _, tasks = play((for_ever, "join"), (for_ever, "sampling"), cancel=True)
    assert told == []
    assert all(task.cancelled() for task in tasks)


def test_a_task_that_nobody_has_decided_about_is_refused():
    with pytest.raises(AssertionError, match="missing in POLICY"):
        play((for_ever, "something new"))


def test_the_table():
    """Tasks that only look, tell or warm up never end a node; every row is used."""
    assert set(POLICY.values()) == {ESSENTIAL, RESTARTABLE, BEST_EFFORT}
    best_effort = {name for name, restarts in POLICY.items() if restarts == BEST_EFFORT}
    assert best_effort == {
        "dashboard",
        "event-shipping",
        "health",
        "hang-watchdog",
        "inspection-socket",
        "metrics",
        "preemption",
        "sampling",
        "snapshot-copies",
        "timers",
        "waiting-line",
        "warm-up",
        "witness",
        "zygote",
    }
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "side_tasks.py"]
    text = "".join(path.read_text() for path in files)
    assert [name for name in POLICY if f'"{name}"' not in text] == []


def test_a_task_set_keeps_what_runs_and_reports_what_fails():
    async def run():
        errors, ended = [], []
        tasks = TaskSet(errors.append)

        async def slow():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("slow")
                raise ValueError("ignored")

        assert await tasks.start(failing(0)(), "quick") == 1
        with pytest.raises(ValueError, match="failure 1"):
            await tasks.start(failing(1)(), "fails")
        kept = [tasks.add(asyncio.create_task(slow())) for _ in range(2)]
        await asyncio.sleep(0)
        assert {*tasks} == {*kept}
        assert [str(error) for error in errors] == ["failure 1"]
        await tasks.close()
        assert ended == ["slow", "slow"]
        assert len(tasks) == 0
        await tasks.close()

    asyncio.run(run())


def test_a_task_that_misses_a_cancellation_is_cancelled_again(monkeypatch):
    """As `asyncio.wait_for` does before Python 3.12 when the result comes at the same moment."""
    monkeypatch.setattr(side_tasks, "CANCEL_AGAIN", 0.01)

    async def run():
        missed = []

        async def misses():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                missed.append(1)
            await asyncio.Event().wait()

        tasks = TaskSet()
        task = tasks.start(misses(), "misses")
        await asyncio.sleep(0)
        await tasks.close()
        assert missed
        assert task.cancelled()

    asyncio.run(run())


# --- Code that only observes may fail, and is told of once ----------------------------------------


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(best_effort, "_reported", set())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_failure_is_reported_once(caplog):
    for _ in range(3):
        with observing("Reading the moon"):
            raise ValueError("clouds")
    [sentence] = warnings(caplog)
    assert sentence.startswith("Reading the moon failed; the job is not affected: ValueError: clou")
    assert "test_side_tasks.py, line" in sentence


def test_an_end_is_not_a_failure():
    with pytest.raises(KeyboardInterrupt), observing("Reading the moon"):
        raise KeyboardInterrupt
    with pytest.raises(asyncio.CancelledError), observing("Reading the moon"):
        raise asyncio.CancelledError


@quiet
class Teller:
    """Tells; badly where it is told to."""

    def say(self, fails=False):
        if fails:
            raise KeyError("mouth")
        return "said"

    async def say_later(self, fails=False):
        return self._say(fails)

    def _say(self, fails):
        if fails:
            raise KeyError("mouth")
        return "said"


def test_public_methods_of_a_quiet_class_do_not_raise(caplog):
    teller = Teller()
    assert (teller.say(), teller.say(True)) == ("said", None)
    assert asyncio.run(teller.say_later()) == "said"
    assert asyncio.run(teller.say_later(True)) is None
    with pytest.raises(KeyError):
        teller._say(True)
    assert [line.split(" ")[0] for line in warnings(caplog)] == ["Teller.say", "Teller.say_later"]
