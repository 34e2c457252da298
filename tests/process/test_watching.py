"""Watching never costs the job; Ctrl-C at any moment costs one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.process import blind
from tests.process.jobs import alive, job, tree
from tests.support import poll_for


def test_a_job_goes_on_though_everything_that_watches_it_fails(tmp_path):
    """Workers start, one dies, the others are told, the next world begins, and the job is done."""
    flags = "--standalone --nproc-per-node=2 --metrics-address=127.0.0.1:0 --dashboard=127.0.0.1:0"
    with job(tmp_path, flags) as it:
        it.program = [blind.__file__]
        node = it.start()
        os.kill(it.world(0, 2)[0]["pid"], signal.SIGKILL)
        it.world(1, 2)
        it.order("finish")
        assert node.wait() == 0, node.stderr
    said = node.stderr
    assert "Traceback" not in said
    for name in ("sampling", "waiting-line", "timers", "hang-watchdog", "inspection-socket"):
        [sentence] = re.findall(rf"(?m)^\[torchelastic\] {name} failed: .*$", said)
        assert "ValueError: blind (blind.py, line " in sentence
        assert sentence.endswith("It restarts in 1 s. Training is not affected.")
    assert said.count("Reporter.world_seen failed; the job is not affected") == 1


@pytest.mark.parametrize(
    ("signum", "moment"),
    [
        pytest.param(signal.SIGINT, lambda pid: tree(pid)[1:], id="the agent is imported"),
        pytest.param(
            signal.SIGTERM,
            lambda pid: tree(pid)[2:],
            id="the zygote is imported",
        ),
    ],
)
def test_a_signal_in_the_first_seconds_costs_one_line(tmp_path, signum, moment):
    """The zygote's import does not end, so that no worker starts before the signal."""
    (tmp_path / "train.py").write_text("import time; time.sleep(60)")
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "torch.py").write_text("import time; time.sleep(600)")
    path = [str(tmp_path / "slow"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-m", "torchelastic", "run", "--standalone", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        poll_for(lambda: moment(process.pid), what="the moment")
        _, agent, *_ = tree(process.pid)
        process.send_signal(signum)
        process.send_signal(signum)  # as `timeout` does
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, said
    assert len(said.splitlines()) <= 1, said
    assert signum.name in said
    assert not alive(agent)


def test_ctrl_c_that_is_not_to_be_handled_stops_the_workers_anyway(tmp_path):
    with job(tmp_path, "--standalone --signals-to-handle=SIGTERM") as it:
        node = it.start()
        (worker,) = it.world(0, 1)
        node.process.send_signal(signal.SIGINT)
        assert node.wait() == 128 + signal.SIGINT, node.stderr
    assert node.events("job-ended")
    assert "Traceback" not in node.stderr
    assert not alive(worker["pid"])
