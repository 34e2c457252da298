"""`--preflight`: the command, its output, its end, and the next try."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.process.jobs import alive
from tests.support import poll_for
from torchelastic.agent import preflight
from torchelastic.agent.spawn import run_program
from torchelastic.events.failure import LOG_LINES_LIMIT


def checked(command: str) -> tuple[str, tuple[str, ...]] | None:
    helpers: set[int] = set()
    found = asyncio.run(preflight.check(command, dict(os.environ), helpers))
    assert helpers == set()
    return found


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("true", None),
        ("echo fine", None),
        ("echo no GPU; echo gpu 3 is gone >&2; exit 3", ("exit code 3", "no GPU|gpu 3 is gone")),
        ("kill -9 $$", ("killed by SIGKILL", "")),
        ("/no/such/check", ("exit code 127", None)),
    ],
)
def test_how_a_check_ends(command, found):
    result = checked(command)
    if found is None:
        assert result is None
        return
    how, lines = result
    assert found[0] in how
    assert found[1] in (None, "|".join(lines))


def test_what_it_started_is_killed_and_not_waited_for():
    how, lines = checked("sleep 600 & echo $!; exit 1")
    assert how == "failed (exit code 1)"
    poll_for(lambda: not alive(int(lines[0])), what="the end of what it started")


def test_a_check_that_does_not_end_is_killed(tmp_path, monkeypatch):
    """Its time is up when it has said something, however long that took."""
    waited, wait = [], asyncio.wait

    async def no_time(futures, timeout):
        while not (tmp_path / "said").exists():
            await asyncio.sleep(0.002)
        waited.append(timeout)
        return await wait(futures, timeout=0 if len(waited) == 1 else timeout)

    monkeypatch.setattr(run_program.asyncio, "wait", no_time)
    assert checked(f"echo waiting for the driver; touch {tmp_path}/said; sleep 600") == (
        "took longer than 300 s",
        ("waiting for the driver",),
    )
    assert waited[0] == preflight.CHECK_TIMEOUT


def test_of_long_output_the_end_is_kept():
    _, lines = checked("yes line | head -n 100000; echo last; exit 1")
    assert (len(lines), lines[-1]) == (LOG_LINES_LIMIT, "last")


def test_it_is_tried_again_after_longer_and_longer_pauses(tmp_path, monkeypatch):
    slept, said = [], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            (tmp_path / "mended").touch()

    monkeypatch.setattr(preflight.asyncio, "sleep", sleep)
    command = f"test -e {tmp_path}/mended || {{ echo no GPU; exit 3; }}"
    asyncio.run(
        preflight.until_passed(command, dict(os.environ), set(), lambda *told: said.append(told))
    )
    assert slept == [5.0, 10.0, 20.0]
    assert said[1] == (
        "failed (exit code 3)",
        "The --preflight check failed (exit code 3): this node stays out of training; the next "
        "check is in 10 s. Last lines of its output:\n  no GPU",
    )
