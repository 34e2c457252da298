"""What an agent has of a worker's last lines, wherever the worker's output goes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from torchelastic.agent.logs import NodeLogs
from torchelastic.config import LaunchConfig, Std
from torchelastic.failure import MOST_LINES


def last_lines(tmp_path: Path, said: dict[Std, bytes], **config) -> tuple[str, ...]:
    """Of a worker that says this and ends, asked at once."""

    async def run() -> tuple[str, ...]:
        logs = NodeLogs(LaunchConfig(**config), tmp_path, consoles=(console, console))
        opened = logs.open(0, {0: 0})
        streams = opened.streams[0]
        for stream, fd in ((Std.OUT, streams.stdout), (Std.ERR, streams.stderr)):
            if fd is not None:
                os.write(fd, said.get(stream, b""))
        opened.started()
        before = opened.last_lines(0)
        await opened.drained(10)
        assert opened.last_lines(0) == before, "also when all of it has been shown"
        logs.close(False)
        return before

    console = os.open(os.devnull, os.O_WRONLY)
    try:
        return asyncio.run(run())
    finally:
        os.close(console)


SAID = {Std.OUT: b"step 6\nstep 7\n", Std.ERR: b"terminate called\n"}


@pytest.mark.parametrize("how", ["redirects", "tee"])
def test_output_and_errors(tmp_path, how):
    lines = last_lines(tmp_path, SAID, log_dir=str(tmp_path), **{how: Std.ALL})
    assert lines == ("step 6", "step 7", "terminate called")


def test_without_files_what_passes_through_the_agent(tmp_path):
    lines = last_lines(tmp_path, SAID, log_dir=os.devnull, tee=Std.ALL)
    assert lines == ("step 6", "step 7", "terminate called")


def test_what_goes_to_the_terminal_is_not_seen(tmp_path):
    assert last_lines(tmp_path, SAID, log_dir=str(tmp_path)) == ()
    assert last_lines(tmp_path, SAID, log_dir=str(tmp_path), redirects=Std.ERR) == (
        "terminate called",
    )


def test_who_said_nothing(tmp_path):
    assert last_lines(tmp_path, {}, log_dir=str(tmp_path), redirects=Std.ALL) == ()


def test_of_much_output_both_streams_are_heard(tmp_path):
    much = b"".join(b"line %d\n" % number for number in range(10_000))
    for said, kept in (({Std.OUT: much}, MOST_LINES), ({Std.OUT: much, Std.ERR: much}, 10)):
        lines = last_lines(tmp_path, said, log_dir=str(tmp_path), redirects=Std.ALL)
        assert lines[-kept:] == tuple(f"line {number}" for number in range(10_000 - kept, 10_000))
        assert len(lines) == MOST_LINES


def test_bytes_that_are_no_text(tmp_path):
    said = {Std.ERR: b"\xff\xfe broken \x00\n"}
    lines = last_lines(tmp_path, said, log_dir=str(tmp_path), redirects=Std.ALL)
    assert lines == ("\ufffd\ufffd broken \ufffd",)


def test_a_file_that_somebody_has_taken_away(tmp_path):
    async def run() -> None:
        logs = NodeLogs(LaunchConfig(log_dir=str(tmp_path), redirects=Std.ALL), tmp_path)
        opened = logs.open(0, {0: 0})
        for path in tmp_path.rglob("*.log"):
            path.unlink()
        assert opened.last_lines(0) == ()
        opened.close()
        logs.close(False)

    asyncio.run(run())
