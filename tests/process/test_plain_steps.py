"""A real plain script, with no line of ours in it: its steps are known."""

from __future__ import annotations

import os
import signal

import pytest

from tests.process.jobs import HERE, job, status
from tests.support import poll_for

SCRIPT = HERE / "plain.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("flag", "workers"), [("", 2), ("--no-zygote", 1)])
def test_steps_rate_and_goodput_of_a_plain_script_that_is_killed(
    tmp_path, monkeypatch, flag, workers
):
    """Its zygote imports torch; with the flag each worker does, after it has begun."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    flags = f"--nnodes=1 --nproc-per-node={workers} --rdzv-id=plain --max-restarts=1 {flag}"
    with job(tmp_path / "job", flags, script=SCRIPT) as made:
        checkpoint = tmp_path / "checkpoint.pt"
        node = made.start(script=[str(SCRIPT), str(checkpoint)])

        def stepped(generation: int) -> list[dict]:
            told = [one for one in node.events("progress") if one["generation"] == generation]
            return told if len(told) > 2 and checkpoint.exists() else []

        seen = poll_for(lambda: stepped(0), what="steps", timeout=200)
        assert (seen[-1]["ranks"], seen[-1]["before"]) == ([*range(workers)], 0)
        pids = node.events("workers-started")[0]["pids"]
        os.kill(pids[-1], signal.SIGKILL)
        again = poll_for(lambda: stepped(1), what="steps after the kill", timeout=200)
        loaded = {one["before"] for one in again}
        assert len(loaded) == 1
        assert loaded.pop() % 10 == 0, "the state of the optimizer that was loaded"
        shown = status("plain")
        (tmp_path / "finish").touch()
        assert node.wait(200) == 0, made.said()
    assert shown["step"] >= max(again[0]["steps"])
    assert shown["rate"] > 0
    assert [rank["step"] is not None for rank in shown["ranks"]] == [True] * workers
    assert shown["recoveries"][0]["redo"] is not None
    found = shown["goodput"]
    assert found["steps_known"]
    assert found["redone_known"]
    assert 0 < found["ratio"] < 1
    assert found["parts"]["unknown"] == 0
    assert "goodput unknown" not in node.stderr
