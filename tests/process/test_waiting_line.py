"""`torchelastic run` below its minimum: a line that counts down on a terminal, and in no file."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.ports import free_port
from tests.process.jobs import SCRIPT
from torchelastic.errors import EXIT_RENDEZVOUS_LOST


@pytest.fixture(autouse=True)
def light_torch(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", with_light_torch()["PYTHONPATH"])


def command(tmp_path: Path) -> list[str]:
    """One node of a job of two, which gives up soon."""
    run = [sys.executable, "-m", "torchelastic", "run", "--nnodes=2", "--wait-for-nodes=2"]
    where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--log-dir={tmp_path}/logs"]
    return [*run, "--no-zygote", *where, str(SCRIPT), str(tmp_path), str(tmp_path)]


def read_all(terminal: int) -> str:
    """The text shown until nobody has the terminal open any more."""
    data = b""
    while True:
        try:
            more = os.read(terminal, 65536)
        except OSError:  # how a terminal says that it was closed
            more = b""
        if not more:
            return data.decode()
        data += more


def test_on_a_terminal_one_line_is_drawn_over_and_removed_in_the_end(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 200, 0, 0))
    try:
        with subprocess.Popen(
            command(tmp_path), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs
        ) as node:
            os.close(theirs)
            shown = read_all(ours)
            assert node.wait(60) != 0
    finally:
        os.close(ours)
    assert "waiting for nodes: 1 of at least 2 joined; " in shown
    after = shown.rpartition("joined; ")[2]
    removed = after.partition("\n")[0].split("\r")
    assert removed[1].strip() == "", "it is gone before anything else is said"
    assert "giving up after 2 s (--wait-for-nodes)" in after


def test_in_a_file_there_are_whole_lines_only(tmp_path):
    ended = subprocess.run(
        command(tmp_path), stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == 170
    assert b"\r" not in ended.stderr
    assert b"] waiting for nodes: 1 of at least 2 joined, for 2 s more\n" in ended.stderr
    sentence = b"waiting for nodes: 1 of at least 2 joined; giving up after 2 s (--wait-for-nodes)"
    assert sentence in ended.stderr


def test_a_node_that_finds_nobody_says_where_it_has_looked(tmp_path):
    flags = ["--nnodes=2", "--wait-for-nodes=1", "--rdzv-conf=is_host=false", "--no-zygote"]
    where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--log-dir={tmp_path}/logs"]
    run = [sys.executable, "-m", "torchelastic", "run", *flags, *where, str(SCRIPT)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_RENDEZVOUS_LOST
    assert "ended with exit code 171: No rendezvous answered at 127.0.0.1:" in ended.stderr
