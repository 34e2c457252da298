from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import socket
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchelastic.agent import tee
from torchelastic.agent.logs import NodeLogs, WorkerStreams, line_prefix, make_run_dir, route
from torchelastic.agent.outlet import Outlet
from torchelastic.agent.output import Console
from torchelastic.agent.tee import CHUNK, Backlog, Lines
from torchelastic.config import LaunchConfig, Std
from torchelastic.errors import ConfigError


def config_for(log_dir: Path | str | None, **changes) -> LaunchConfig:
    return LaunchConfig(run_id="job", log_dir=None if log_dir is None else str(log_dir), **changes)


@contextmanager
def console_file(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        yield fd
    finally:
        os.close(fd)


def say(fd: int, data: bytes) -> None:
    """Write all of it, then end the stream."""
    with open(fd, "wb") as stream:
        stream.write(data)


class Run:
    """One node whose console is a file."""

    def __init__(self, tmp_path: Path, config: LaunchConfig, console_fd: int) -> None:
        self.config = config
        self.run_dir = make_run_dir(config)
        self.logs = NodeLogs(config, self.run_dir, consoles=(console_fd, console_fd))

    async def generation(self, number: int, said: dict[tuple[int, Std], bytes]) -> None:
        """Let workers say something and end."""
        local_ranks = sorted({local_rank for local_rank, _ in said})
        logs = self.logs.open(number, {local_rank: local_rank + 4 for local_rank in local_ranks})
        held = []
        for (local_rank, stream), data in said.items():
            streams = logs.streams[local_rank]
            fd = streams.stdout if stream is Std.OUT else streams.stderr
            if fd is not None:
                held.append((os.dup(fd), data))
        logs.started()
        # In a thread: a pipe holds 64 KiB, and it is this loop that empties it.
        await asyncio.gather(*(asyncio.to_thread(say, fd, data) for fd, data in held))
        await logs.drained(10)

    def file(self, number: int, name: str) -> bytes:
        return (self.run_dir / f"attempt_{number}" / name).read_bytes()


def run_one(tmp_path: Path, said: dict[tuple[int, Std], bytes], **changes) -> tuple[Run, bytes]:
    """One generation under `--log-dir`; returns what the console got as well."""
    console = tmp_path / "console"
    with console_file(console) as fd:
        run = Run(tmp_path, config_for(tmp_path / "logs", **changes), fd)
        asyncio.run(run.generation(0, said))
        run.logs.close(True)
    return run, console.read_bytes()


NONE, OUT, ERR, ALL = Std.NONE, Std.OUT, Std.ERR, Std.ALL
FILES, NO_FILES = "logs", os.devnull


@pytest.mark.parametrize(
    ("log_dir", "redirects", "tee", "shown", "expected"),
    [
        (FILES, NONE, NONE, True, "inherit"),
        (FILES, NONE, NONE, False, "discard"),
        (FILES, OUT, NONE, True, "file"),
        (FILES, OUT, NONE, False, "file"),
        (FILES, ERR, NONE, True, "inherit"),
        (FILES, NONE, OUT, True, "tee"),
        (FILES, NONE, OUT, False, "file"),
        (FILES, ALL, ALL, True, "tee"),
        (FILES, {1: ALL}, NONE, True, "inherit"),
        (FILES, {0: ALL}, NONE, True, "file"),
        (NO_FILES, OUT, NONE, True, "inherit"),
        (NO_FILES, OUT, NONE, False, "discard"),
        (NO_FILES, NONE, OUT, True, "tee"),
        (NO_FILES, NONE, OUT, False, "discard"),
    ],
)
def test_where_stdout_of_local_rank_0_goes(log_dir, redirects, tee, shown, expected):
    config = config_for(
        log_dir,
        redirects=redirects,
        tee=tee,
        local_ranks_filter=frozenset({0 if shown else 7}),
    )
    assert route(config, 0, Std.OUT) == expected


def test_an_empty_filter_shows_every_rank():
    assert route(config_for(None, local_ranks_filter=frozenset()), 3, Std.OUT) == "inherit"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "[trainer1]:"),
        ("", "[trainer1]:"),
        ("[${rank}]: ", "[9]: "),
        ("${role_name}.${local_rank}/${rank} ${other}", "trainer.1/9 ${other}"),
    ],
)
def test_line_prefix(template, expected):
    config = config_for(None, role="trainer", log_line_prefix_template=template)
    assert line_prefix(config, local_rank=1, rank=9) == expected


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\nc"], [b"ab", b"c"]),
        ([b"\n\n"], [b"", b""]),
        ([b"a\r\nb\r\n"], [b"a", b"b"]),
        ([b"a\r", b"\nb\n"], [b"a", b"b"]),
        ([b"\r 10%", b"\r 20%", b"\r done\n"], [b" 10%", b" 20%", b" done"]),
        ([b"\xff\xfe\n", b"\xc3", b"\xa9"], [b"\xff\xfe", b"\xc3\xa9"]),
        ([b"a\x0bb\x1cc\xc2\x85\n"], [b"a\x0bb\x1cc\xc2\x85"]),
        ([], []),
    ],
)
def test_lines(chunks, expected):
    lines = Lines()
    found = [line for chunk in chunks for line in lines.feed(chunk)]
    assert found + lines.rest() == expected


@pytest.mark.parametrize("size", [CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("step", [1000, CHUNK, 10 * CHUNK])
def test_a_long_line_is_passed_on_in_pieces(size, step):
    line = bytes(65 + index % 26 for index in range(size))
    lines = Lines()
    found = [
        piece for start in range(0, size, step) for piece in lines.feed(line[start : start + step])
    ]
    found += lines.feed(b"\nnext\n")
    assert found.pop() == b"next"
    assert b"".join(found) == line
    assert max(map(len, found)) <= CHUNK


def test_by_default_streams_are_inherited_and_only_the_error_file_is_named(tmp_path):
    run = Run(tmp_path, config_for(tmp_path / "logs"), 1)
    logs = run.logs.open(3, {0: 0, 1: 1})
    logs.started()
    assert (logs.streams[1].stdout, logs.streams[1].stderr) == (None, None)
    error_file = Path(logs.streams[1].error_file)
    assert error_file == run.run_dir / "attempt_3" / "1" / "error.json"
    assert error_file.parent.is_dir()
    run.logs.close(True)


def test_the_layout_is_torchruns(tmp_path):
    said = {(0, OUT): b"out\n", (0, ERR): b"err\n"}
    run, console = run_one(tmp_path, said, redirects=ALL)
    assert run.run_dir.parent == tmp_path / "logs"
    assert run.run_dir.name.startswith("job_")
    assert run.file(0, "0/stdout.log") == b"out\n"
    assert run.file(0, "0/stderr.log") == b"err\n"
    assert console == b""


def test_tee_writes_the_bytes_to_the_file_and_prefixed_lines_to_the_console(tmp_path):
    data = b"first\n\xff not utf-8\nno end"
    run, console = run_one(tmp_path, {(0, OUT): data}, tee=OUT)
    assert run.file(0, "0/stdout.log") == data
    assert console == b"[default0]:first\n[default0]:\xff not utf-8\n[default0]:no end\n"


def test_streams_may_be_chosen_per_local_rank(tmp_path):
    said = {(0, OUT): b"zero\n", (1, OUT): b"one\n"}
    run, console = run_one(tmp_path, said, tee={0: OUT}, redirects={1: OUT})
    assert console == b"[default0]:zero\n"
    assert run.file(0, "1/stdout.log") == b"one\n"


def test_the_filter_hides_a_rank_from_the_console_but_not_from_its_file(tmp_path):
    said = {(0, OUT): b"zero\n", (1, OUT): b"one\n"}
    run, console = run_one(tmp_path, said, tee=OUT, local_ranks_filter=frozenset({1}))
    assert console == b"[default1]:one\n"
    assert run.file(0, "0/stdout.log") == b"zero\n"


def test_matching_lines_of_all_tee_d_workers_are_gathered_in_one_file(tmp_path):
    run, _ = run_one(
        tmp_path,
        {(0, OUT): b"loss 1\nnoise\n", (1, OUT): b"noise\nacc 2", (0, ERR): b"loss 3\n"},
        tee=OUT,
        redirects=ERR,
        duplicate_stdout_filters=("loss", "acc"),
        duplicate_stderr_filters=("loss",),
    )
    lines = sorted(run.file(0, "filtered_stdout.log").splitlines())
    assert lines == [b"[default0]:loss 1", b"[default1]:acc 2"]
    assert run.file(0, "filtered_stderr.log") == b""


def test_a_generation_leaves_the_logs_of_others_alone(tmp_path):
    with console_file(tmp_path / "console") as fd:
        run = Run(tmp_path, config_for(tmp_path / "logs", redirects=OUT), fd)
        for generation in range(3):
            asyncio.run(run.generation(generation, {(0, OUT): b"%d" % generation}))
        run.logs.close(True)
    assert [run.file(generation, "0/stdout.log") for generation in range(3)] == [b"0", b"1", b"2"]


def test_no_files_with_dev_null(tmp_path):
    with console_file(tmp_path / "console") as fd:
        run = Run(tmp_path, config_for(os.devnull, tee=OUT, duplicate_stdout_filters=("a",)), fd)
        asyncio.run(run.generation(0, {(0, OUT): b"a\n" * 100_000}))
        run.logs.close(True)
    assert run.run_dir == Path(os.devnull)
    assert (tmp_path / "console").read_bytes() == b"[default0]:a\n" * 100_000


def test_no_error_file_with_dev_null():
    config = config_for(os.devnull)
    logs = NodeLogs(config, make_run_dir(config))
    assert logs.open(0, {0: 0}).streams[0].error_file == ""
    logs.close(True)


@pytest.mark.parametrize(
    ("success", "written", "left"),
    [(True, True, False), (False, True, True), (False, False, False)],
)
def test_temporary_logs_stay_only_where_a_failure_left_something(
    tmp_path, monkeypatch, success, written, left
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = config_for(None)
    run_dir = make_run_dir(config)
    logs = NodeLogs(config, run_dir)
    opened = logs.open(0, {0: 0})
    opened.started()
    if written:
        Path(opened.streams[0].error_file).write_text("{}")
    logs.close(success)
    assert run_dir.parent.name.startswith("torchelastic_")
    assert run_dir.parent.exists() is left


def test_logs_under_log_dir_are_kept(tmp_path):
    config = config_for(tmp_path / "logs")
    run_dir = make_run_dir(config)
    NodeLogs(config, run_dir).close(True)
    assert run_dir.is_dir()


def test_a_job_id_makes_a_plain_directory_name(tmp_path):
    config = LaunchConfig(run_id="team/../x y" + "z" * 300, log_dir=str(tmp_path))
    assert make_run_dir(config).parent == tmp_path


def test_a_log_dir_that_cannot_be_used_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--log-dir .*/file cannot be used for logs .*: give"):
        make_run_dir(config_for(tmp_path / "file"))


def test_a_relative_log_dir_holds_wherever_a_worker_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert make_run_dir(config_for("logs")).parent == tmp_path / "logs"


def small_pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    return read_end, write_end


def test_a_console_nobody_reads_holds_up_neither_loop_nor_worker(tmp_path, caplog):
    data = b"x" * 99 + b"\n"
    read_end, write_end = small_pipe()
    run = Run(tmp_path, config_for(tmp_path / "logs", tee=OUT), write_end)

    async def chatter() -> None:
        logs = run.logs.open(0, {0: 0})
        stream = os.dup(logs.streams[0].stdout)
        logs.started()
        await asyncio.wait_for(asyncio.to_thread(say, stream, data * 50_000), 20)
        await logs.drained(0.01)

    asyncio.run(chatter())
    run.logs.close(True)
    assert run.file(0, "0/stdout.log") == data * 50_000
    assert "The console is too slow" in caplog.text
    assert os.get_blocking(write_end), "workers share this descriptor and must be able to print"
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("log_dir", ["logs", os.devnull])
def test_a_slow_console_gets_everything_in_the_end(tmp_path, log_dir):
    lines = b"".join(b"line %d\n" % number for number in range(100_000))
    read_end, write_end = small_pipe()
    chosen = tmp_path / log_dir if log_dir != os.devnull else log_dir
    run = Run(tmp_path, config_for(chosen, tee=OUT), write_end)
    shown: list[bytes] = []

    def read_slowly() -> None:
        with open(read_end, "rb") as stream:
            shown.extend(iter(lambda: stream.read(1000), b""))

    async def chatter() -> None:
        reader = threading.Thread(target=read_slowly)
        saying = asyncio.create_task(run.generation(0, {(0, OUT): lines}))
        reader.start()
        await saying
        run.logs.close(True)
        os.close(write_end)
        await asyncio.to_thread(reader.join)

    asyncio.run(chatter())
    expected = b"".join(b"[default0]:" + line + b"\n" for line in lines.splitlines())
    assert b"".join(shown) == expected


def test_a_console_that_is_closed_ends_the_showing_not_the_file(tmp_path):
    read_end, write_end = os.pipe()
    run = Run(tmp_path, config_for(tmp_path / "logs", tee=OUT), write_end)
    os.close(read_end)
    asyncio.run(run.generation(0, {(0, OUT): b"said\n" * 50_000}))
    run.logs.close(True)
    os.close(write_end)
    assert run.file(0, "0/stdout.log") == b"said\n" * 50_000


def test_a_stream_held_open_by_a_stranger_does_not_hold_up_the_end(tmp_path):
    with console_file(tmp_path / "console") as fd:
        run = Run(tmp_path, config_for(tmp_path / "logs", tee=OUT), fd)

        async def leave_open() -> int:
            logs = run.logs.open(0, {0: 0})
            held = os.dup(logs.streams[0].stdout)
            logs.started()
            os.write(held, b"last words")
            await logs.drained(0.01)
            return held

        os.close(asyncio.run(leave_open()))
        run.logs.close(True)
    assert run.file(0, "0/stdout.log") == b"last words"
    assert (tmp_path / "console").read_bytes() == b"[default0]:last words\n"


def test_a_generation_that_never_started_is_closed_too(tmp_path):
    run = Run(tmp_path, config_for(tmp_path / "logs", tee=ALL), 1)
    before = len(os.listdir("/proc/self/fd"))

    async def give_up() -> None:
        logs = run.logs.open(0, {0: 0, 1: 1})
        await logs.drained(10)

    asyncio.run(give_up())
    assert len(os.listdir("/proc/self/fd")) == before
    run.logs.close(True)


def test_a_full_disk_costs_the_file_and_not_the_stream(caplog):
    backlog = Backlog(Path("/dev/full"))
    backlog.append(b"one", shown=False)
    backlog.append(b"two", shown=False)
    assert (backlog.take(), backlog.size) == (b"onetwo", 0)
    assert caplog.messages == ["Output is missing in /dev/full: No space left on device."]
    backlog.append(b"x" * CHUNK, shown=False)
    assert backlog.full
    backlog.close()


@pytest.fixture
def file_size_limit():
    """A disk that is full after so many bytes, made by the kernel's limit on the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_log_file_goes_on_when_there_is_room_again(tmp_path, monkeypatch, file_size_limit):
    monkeypatch.setattr(tee, "TRY_AGAIN", 0.0)
    path = tmp_path / "stdout.log"
    backlog = Backlog(path)
    file_size_limit(6)
    backlog.append(b"one\n", shown=True)
    backlog.append(b"two\n", shown=True)
    backlog.append(b"three\n", shown=False)
    file_size_limit(1 << 20)
    backlog.append(b"four\n", shown=False)
    assert backlog.take() == b"three\nfour\n", "in its order, from memory"
    backlog.append(b"five\n", shown=True)
    backlog.close()
    missing = len("o\nthree\nfour\n")
    note = f"\n({missing} bytes are missing here: there was no room for them.)\n"
    assert path.read_text() == f"one\ntw{note}five\n"


def test_a_log_file_cut_short_by_somebody_does_not_stop_the_showing(tmp_path):
    backlog = Backlog(tmp_path / "stdout.log")
    backlog.append(b"gone", shown=False)
    os.truncate(tmp_path / "stdout.log", 0)
    assert (backlog.take(), backlog.size) == (b"", 0)
    backlog.close()


@pytest.mark.parametrize("reopen", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
def test_every_kind_of_console_shows_all(kind, reopen, monkeypatch):
    if not reopen:
        monkeypatch.setattr(Outlet, "_reopened", staticmethod(lambda fd: None))
    read_end, write_end = make_console(kind)
    data = b"".join(b"%06d\n" % number for number in range(20_000))
    console = Console(write_end)

    async def show() -> bytes:
        console.write(data)
        reading = asyncio.create_task(asyncio.to_thread(read_exactly, read_end, len(data)))
        await asyncio.wait_for(console.flushed(), 20)
        return await reading

    assert asyncio.run(show()) == data
    console.close()
    os.close(read_end)
    os.close(write_end)


def make_console(kind: str) -> tuple[int, int]:
    if kind == "pipe":
        return small_pipe()
    if kind == "socket":
        one, other = socket.socketpair()
        return one.detach(), other.detach()
    master, slave = os.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # or it would turn line feeds into two characters
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    return master, slave


def read_exactly(fd: int, size: int) -> bytes:
    read = b""
    while len(read) < size:
        read += os.read(fd, size - len(read))
    return read


def test_a_console_that_was_never_open_shows_nothing():
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.close(write_end)
    console = Console(write_end)
    console.write(b"to nobody")
    assert console.closed
    assert console.room


def test_a_generation_whose_files_cannot_be_made_has_none(tmp_path, caplog):
    config = config_for(tmp_path / "logs", redirects={0: ALL}, tee={1: OUT})
    run_dir = make_run_dir(config)
    (run_dir / "attempt_3").write_text("")  # as good as a disk without room for a directory

    async def open_both() -> None:
        logs = NodeLogs(config, run_dir)
        without = logs.open(3, {0: 0, 1: 1})
        assert without.streams[0] == WorkerStreams(None, None, "")
        assert without.streams[1].stdout is not None, "and is shown as before"
        without.close()
        after = logs.open(4, {0: 0, 1: 1})
        assert after.streams[0].error_file == str(run_dir / "attempt_4" / "0" / "error.json")
        after.close()
        logs.close(True)

    asyncio.run(open_both())
    [warned] = caplog.messages
    assert warned.startswith("Generation 3 has no log files: ")
