"""Whatever becomes of those who look on, and of where they look: the job does not notice.

Real agents on a full disk, with handlers that are stuck, with a stderr that nobody reads, with logs
that somebody removes, with scrapers that send what they should not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.process.jobs import Job, Node, job
from tests.process.test_collector import collected, has_all, is_world_of_two, own
from tests.support import poll_for

ALONE = "--standalone --no-zygote --max-restarts=9"
PATIENCE = 90.0
#: Events of one agent: several times those of a start.
MUCH = 50


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
    command += [f"--log-dir={disk.path}", *it.flags, str(it.script)]
    command += [str(it._lines), str(it._orders)]
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
        command = [sys.executable, "-m", "torchelastic", "run", *it.flags, str(it.script)]
        command += [str(it._lines), str(it._orders)]
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


# A killed collector


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_leader_killed_in_the_middle_of_the_story_costs_no_event_of_the_others(tmp_path):
    """They have much to tell, and the leader dies while it is told."""
    with job(tmp_path, "--nnodes=2:3 --settle=60 --no-zygote") as it:
        nodes = [it.start(), it.start(), it.start()]
        it.world(0, 3)
        poll_for(lambda: collected(nodes[0]), what="a beginning", timeout=PATIENCE)
        for node in nodes[1:]:
            agent = node.agent_pid
            poll_for(
                lambda n=node, a=agent: said(n, a) > MUCH, what="much to tell", timeout=PATIENCE
            )
        nodes[0].kill()
        left = nodes[1:]
        poll_for(
            lambda: [node for node in left if is_world_of_two(node) and has_all(node, *left)],
            what="the whole story of those who are left",
            timeout=PATIENCE,
        )
        it.order("finish")
        assert [node.wait() for node in left] == [0, 0], it.said()
        assert all(own(node)[-1].type == "job-ended" for node in left)


def said(node: Node, agent: int) -> int:
    """How many events an agent has written, after one more signal that it tells of."""
    os.kill(agent, signal.SIGUSR1)
    [path] = (node.directory / "logs").rglob("events.jsonl")
    return path.read_bytes().count(b"\n")


# Scrapers that send what they should not


NO_SCRAPES = [
    b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nstop",
    b"PUT /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET /metrics\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x5a" * 40 + b"\r\n\r\n",
    b"\x00" * 100_000,
    b"",
]


@pytest.mark.needs("prometheus_client")
def test_nothing_that_is_sent_to_the_metrics_endpoint_changes_anything(tmp_path):
    with job(tmp_path, f"{ALONE} --metrics-address=0") as it:
        node = it.start()
        it.world(0, 1)
        where = re.compile(r"metrics at http://127\.0\.0\.1:(\d+)/metrics")
        port = int(poll_for(lambda: where.search(node.stderr), what="where to ask")[1])
        for sent in NO_SCRAPES:
            answer = ask(port, sent)
            assert not answer.startswith(b"HTTP/1.1 200"), sent
            assert b"torchelastic_" not in answer
        asked = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        page = poll_for(lambda: ask(port, asked), what="a page", timeout=PATIENCE)
        assert b"torchelastic_generation 0.0" in page
        assert it.world_is(0)
        it.order("finish")
        assert node.wait() == 0, node.stderr
        assert node.events("worker-failed", "generation-over") == []


def ask(port: int, sent: bytes) -> bytes:
    """All that is answered; nothing where the connection is ended instead."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                answer += data
        except ConnectionError:
            return answer  # it has heard enough
    return answer
