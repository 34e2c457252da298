"""The store host and the zygote are killed, and what takes their place, too: the job goes on."""

from __future__ import annotations

import os
import shutil
import signal

from tests.light import PLACE
from tests.process.jobs import job, tree, words_of
from tests.support import poll_for

ZYGOTE, STORE_HOST = "torchelastic-zygote", "torchelastic.worker.store_host"


def running(node, what):
    """The processes of a node that show `what` in their command lines."""
    return {pid for pid in tree(node.agent_pid) if what in words_of(pid)}


def kill_next(node, what, killed):
    """Kill the process as soon as it is seen; returns all that were killed."""
    new = poll_for(lambda: running(node, what) - killed, what=f"{what}, after {len(killed)}")
    for pid in new:
        os.kill(pid, signal.SIGKILL)
    return killed | new


def test_a_store_host_killed_again_while_it_starts_ends_no_node(tmp_path, monkeypatch):
    """The world that met at its store is replaced: its workers could not meet there any more.

    The next store host is waited for, with pauses of 1 and 2 seconds.
    """
    held = tmp_path / "held"  # while it exists, the import of torch does not end
    shutil.copytree(PLACE / "torch", tmp_path / "path" / "torch")
    with (tmp_path / "path" / "torch" / "__init__.py").open("a") as file:
        file.write(f"import os, time\nwhile os.path.exists({str(held)!r}): time.sleep(0.01)\n")
    path = [str(tmp_path / "path"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with job(tmp_path, "--standalone --nproc-per-node=2 --max-restarts=1 --no-zygote") as it:
        node = it.start(script=it.command())
        it.world(0, 2)
        held.touch()
        killed = kill_next(node, STORE_HOST, set())
        kill_next(node, STORE_HOST, killed)
        held.unlink()
        it.world(1, 2)
        it.order("finish")
        assert node.wait() == 0, node.stderr
    assert "the workers' store host exited (killed by SIGKILL)" in node.stderr
    assert "Traceback" not in node.stderr


def test_a_zygote_killed_again_while_it_starts_is_replaced(tmp_path):
    """Workers do not notice; when another one is ready, they are copies again.

    It is waited for, with pauses of 1 and 2 seconds.
    """
    with job(tmp_path, "--standalone --nproc-per-node=2") as it:
        node = it.start()
        it.world(0, 2)
        killed = kill_next(node, ZYGOTE, set())
        kill_next(node, ZYGOTE, killed)
        poll_for(lambda: "Another one starts in 2 s" in node.stderr, what="the second is missed")
        ready = len(node.events("zygote-ready"))
        it.order("exit 3", rank=0, generation=0)
        it.world(1, 2)
        poll_for(lambda: node.events("zygote-ready")[ready:], what="a third zygote is ready")
        plain = node.stderr.count("Workers start as plain processes")
        it.order("exit 3", rank=0, generation=1)
        it.world(2, 2)
        it.order("finish")
        assert node.wait() == 0, node.stderr
    assert node.stderr.count("Workers start as plain processes") == plain <= 1
    assert "Traceback" not in node.stderr
