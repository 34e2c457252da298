"""A script that asks `torchelastic.leaving()`, on a node that gets a preemption notice."""

import os
import re
import signal

from tests.process.jobs import job
from tests.support import poll_for

SCRIPT = """
import signal, sys, time, torchelastic
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("trains", flush=True)
deadline = time.monotonic() + 60
while (notice := torchelastic.leaving()) is None:
    assert time.monotonic() < deadline
    time.sleep(0.01)
print(f"saved: {notice.reason}, {notice.seconds:.0f} s left", flush=True)
sys.exit(1)
"""


def test_a_script_saves_and_exits_when_its_node_leaves(tmp_path):
    script, notice = tmp_path / "train.py", tmp_path / "notice"
    script.write_text(SCRIPT)
    with job(tmp_path / "job", f"--nnodes=1 --preemption=file={notice}") as made:
        node = made.start(script=[str(script)])
        poll_for(lambda: "trains" in node.stdout, what="the script")
        notice.write_text("60 spot reclaim")
        assert node.wait() == 143
        assert re.search(r"saved: spot reclaim, 5[0-8] s left", node.stdout), node.stdout
        assert "left the job (spot reclaim)" in node.stderr


def test_a_sigterm_after_a_notice_shortens_the_time(tmp_path):
    """A script that saves until the notice's deadline would be killed with its agent."""
    script, notice = tmp_path / "train.py", tmp_path / "notice"
    script.write_text(SCRIPT.replace("sys.exit(1)", "time.sleep(60)"))
    flags = f"--nnodes=1 --preemption=file={notice} --shutdown-timeout=0.5"
    with job(tmp_path / "job", flags) as made:
        node = made.start(script=[str(script)])
        poll_for(lambda: "trains" in node.stdout, what="the script")
        notice.write_text("60 spot reclaim")
        poll_for(lambda: "saved" in node.stdout, what="the script has seen the notice")
        os.kill(node.pid, signal.SIGTERM)
        assert node.wait(30) == 143
