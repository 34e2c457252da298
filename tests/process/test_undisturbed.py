"""Observers and their places may fail in any way: the job does not notice.

Real agents on a full disk, with handlers that are stuck, with a stderr that nobody reads, with logs
that somebody removes, with scrapers that send what they should not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.process.jobs import Job, Node, job
from tests.process.test_collector import own
from tests.support import poll_for

ALONE = "--standalone --no-zygote --max-restarts=9"
PATIENCE = 90.0


def fail_and_recover(it: Job, generation: int, size: int = 1) -> None:
    """A worker of this generation fails, and all of the next one start."""
    it.order("exit 3", generation=generation, rank=0)
    it.world(generation + 1, size)


# A full disk


class TinyDisk:
    """A tmpfs that is there for one node only, in a mount namespace of its own."""

    MOUNT = 'mount -t tmpfs -o size=256k,nr_inodes=60 none "$0" && exec "$@"'

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.prefix = ["unshare", "--mount", "sh", "-c", self.MOUNT, str(path)]
        self.seen = path

    def look_from(self, pid: int) -> None:
        """See it as this process does, once it is mounted there."""
        self.seen = Path(f"/proc/{pid}/root") / self.path.relative_to("/")
        poll_for(lambda: any(self.seen.rglob("events.jsonl")), what="its log", timeout=PATIENCE)

    def fill(self) -> None:
        """No room for a byte, nor for another file."""
        with (self.seen / "filler").open("wb", buffering=0) as file:
            until_full(lambda number: file.write(bytes(4096)))
        until_full(lambda number: (self.seen / f"filler{number}").touch())

    def clear(self) -> None:
        for path in self.seen.glob("filler*"):
            path.unlink()


def until_full(take: Callable[[int], object]) -> None:
    for number in range(1000):
        try:
            take(number)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return
    raise AssertionError("the disk is larger than it should be")


def start_on(disk: TinyDisk, it: Job) -> Node:
    command = [*disk.prefix, sys.executable, "-m", "torchelastic", "run"]
    command += [f"--log-dir={disk.path}", *it.flags, *it.command()]
    node = Node(command, it.directory / "node0", with_light_torch())
    it.nodes.append(node)
    disk.look_from(node.pid)
    (node.directory / "logs").symlink_to(disk.seen)
    return node


@pytest.mark.needs("mount")
def test_a_job_whose_log_disk_is_full_goes_on_and_its_log_with_the_first_room(tmp_path):
    disk = TinyDisk(tmp_path / "disk")
    with job(tmp_path / "job", f"{ALONE} --tee=3") as it:
        node = start_on(disk, it)
        it.world(0, 1)
        agent = node.agent_pid
        disk.fill()
        fail_and_recover(it, 0)
        assert node.stderr.count("Generation 1 has no log files") == 1
        poll_for(lambda: told_after_a_signal(agent, node), what="a word of that", timeout=PATIENCE)
        fail_and_recover(it, 1)
        disk.clear()
        fail_and_recover(it, 2)
        poll_for(lambda: formed(node, 3), what="the log again", timeout=PATIENCE)
        notes = [record.fields["text"] for record in own(node) if record.type == "note"]
        assert any("not written" in text for text in notes)
        assert any(disk.seen.rglob("attempt_3/0/stdout.log"))
        it.order("finish")
        assert node.wait() == 0, node.stderr
        assert node.stderr.count("Events are lost") == 1, "once, however often the disk is full"


def told_after_a_signal(agent: int, node: Node) -> bool:
    """The last page of the log has room for some events yet."""
    os.kill(agent, signal.SIGUSR1)
    return "Events are lost" in node.stderr


def formed(node: Node, generation: int) -> bool:
    """Read as everybody does: the last line before the disk was full is cut short."""
    return ("world-formed", generation) in {(one.type, one.generation) for one in own(node)}


# Logs that somebody removes


def test_a_log_directory_that_is_removed_is_there_again_with_the_next_generation(tmp_path):
    with job(tmp_path, ALONE) as it:
        node = it.start()
        it.world(0, 1)
        poll_for(lambda: node.events("workers-started"), what="the first workers")
        shutil.rmtree(node.directory / "logs")
        fail_and_recover(it, 0)
        poll_for(lambda: node.events("workers-started"), what="the next ones, in a new log")
        it.order("finish")
        assert node.wait() == 0, node.stderr
        assert node.events()[-1]["type"] == "job-ended"


# Those who do not read


HANDLERS = """
import threading

def stuck(line):
    threading.Event().wait()

def broken(line):
    raise RuntimeError("this one takes nothing")
"""


@pytest.mark.parametrize("name", ["stuck", "broken"])
def test_a_handler_of_events_that_takes_none_costs_nothing(tmp_path, monkeypatch, name):
    (tmp_path / "strange_handlers.py").write_text(HANDLERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with job(tmp_path / "job", f"{ALONE} --event-log-handler=strange_handlers:{name}") as it:
        node = it.start()
        it.world(0, 1)
        fail_and_recover(it, 0)
        it.order("finish")
        assert node.wait() == 0, node.stderr
        assert node.events()[-1]["type"] == "job-ended", "the log has everything"
        assert node.stderr.count("Events are lost: --event-log-handler") == 1


def test_a_stderr_that_nobody_reads_blocks_nothing(tmp_path):
    """As a terminal after Ctrl-S; events go there, too."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write_end, bytes(4096))
    with job(tmp_path, f"{ALONE} --event-log-handler=console --log-dir={tmp_path}/logs") as it:
        command = [sys.executable, "-m", "torchelastic", "run", *it.flags, *it.command()]
        with subprocess.Popen(
            command, stderr=write_end, stdin=subprocess.DEVNULL, env=with_light_torch()
        ) as process:
            os.close(write_end)
            try:
                it.world(0, 1)
                fail_and_recover(it, 0)
                it.order("finish")
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()
    os.close(read_end)
