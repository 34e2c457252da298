import asyncio
import fcntl
import os
import socket
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.agent.cast import in_loop
from torchelastic.agent.output import output_stream, tee
from torchelastic.agent.output.log_files import (
    NodeLogs,
    WorkerStreams,
    line_prefix,
    make_run_dir,
    route,
)
from torchelastic.agent.output.output_stream import NonblockingWriter, OutputStream
from torchelastic.agent.output.tee import CHUNK, Backlog, CppStackFilter, LineSplitter
from torchelastic.config import LaunchConfig, Std
from torchelastic.errors import ConfigError
from torchelastic.events.failure import LOG_LINES_LIMIT


def config_for(log_dir: Path | str | None, **changes) -> LaunchConfig:
    changes = {"run_id": "job", "log_copy": False, **changes}
    return LaunchConfig(log_dir=None if log_dir is None else str(log_dir), **changes)


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

    def __init__(self, config: LaunchConfig, console_fd: int = 1) -> None:
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
    """One generation, under `--log-dir` by default; returns what the console got as well."""
    console = tmp_path / "console"
    with console_file(console) as fd:
        run = Run(config_for(**{"log_dir": tmp_path / "logs", **changes}), fd)
        asyncio.run(run.generation(0, said))
        run.logs.close(True)
    return run, console.read_bytes()


NONE, OUT, ERR, ALL = Std.NONE, Std.OUT, Std.ERR, Std.ALL
FILES, NO_FILES = "logs", os.devnull


@pytest.mark.parametrize(
    ("log_dir", "redirects", "tee", "ranks", "expected"),
    [
        (FILES, NONE, NONE, {0}, "inherit"),
        (FILES, NONE, NONE, {7}, "discard"),
        (FILES, NONE, NONE, {}, "inherit"),
        (FILES, OUT, NONE, {0}, "file"),
        (FILES, OUT, NONE, {7}, "file"),
        (FILES, ERR, NONE, {0}, "inherit"),
        (FILES, NONE, OUT, {0}, "tee"),
        (FILES, NONE, OUT, {7}, "file"),
        (FILES, ALL, ALL, {0}, "tee"),
        (FILES, {1: ALL}, NONE, {0}, "inherit"),
        (FILES, {0: ALL}, NONE, {0}, "file"),
        (NO_FILES, OUT, NONE, {0}, "inherit"),
        (NO_FILES, OUT, NONE, {7}, "discard"),
        (NO_FILES, NONE, OUT, {0}, "tee"),
        (NO_FILES, NONE, OUT, {7}, "discard"),
    ],
)
def test_stdout_of_rank_0_goes_to_configured_streams(log_dir, redirects, tee, ranks, expected):
    """An empty filter shows every rank."""
    shown = frozenset(ranks)
    config = config_for(log_dir, redirects=redirects, tee=tee, local_ranks_filter=shown)
    assert route(config, 0, Std.OUT) == expected


@pytest.mark.parametrize(
    ("log_dir", "changes", "is_terminal", "expected"),
    [
        (FILES, {}, False, "copy"),
        (FILES, {}, True, "inherit"),
        (NO_FILES, {}, False, "inherit"),
        (FILES, {"log_copy": False}, False, "inherit"),
        (FILES, {"local_ranks_filter": frozenset({7})}, False, "discard"),
        (FILES, {"redirects": OUT}, False, "file"),
        (FILES, {"tee": OUT}, True, "tee"),
    ],
)
def test_unredirected_output_is_copied_unless_on_terminal(log_dir, changes, is_terminal, expected):
    config = config_for(log_dir, **{"log_copy": True, **changes})
    assert route(config, 0, Std.OUT, is_terminal=is_terminal) == expected


def test_a_copy_shows_every_byte_as_it_was_in_its_order(tmp_path):
    """The console is one file for both streams: then they share a pipe."""
    data = b"\r 10%\r 20%\xff\nno end"
    run, console = run_one(tmp_path, {(0, OUT): data}, log_copy=True)
    assert console == run.file(0, "0/stdout.log") == data
    logs = NodeLogs(config_for(tmp_path, log_copy=True), tmp_path, consoles=(1, 1))

    async def opened() -> None:
        made = logs.open(1, {0: 0})
        assert made.streams[0].stdout == made.streams[0].stderr is not None
        made.close()

    asyncio.run(opened())


def test_a_copy_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(tee, "COPY_LIMIT", 3 * CHUNK)
    data = b"".join(b"%09d\n" % number for number in range(CHUNK))
    run, console = run_one(tmp_path, {(0, OUT): data}, log_copy=True)
    assert console == data
    kept = run.file(0, "0/stdout.log.1") + run.file(0, "0/stdout.log")
    assert data.endswith(kept)
    assert 3 * CHUNK < len(kept) <= 8 * CHUNK + 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "[trainer1]:"),
        ("", "[trainer1]:"),
        ("[${rank}]: ", "[9]: "),
        ("${role_name}.${local_rank}/${rank} ${other}", "trainer.1/9 ${other}"),
        ("${hostname}:${rank}: ", f"{socket.gethostname()}:9: "),
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
    lines = LineSplitter()
    found = [line for chunk in chunks for line in lines.feed(chunk)]
    assert found + lines.rest() == expected


@pytest.mark.parametrize(
    ("size", "step"), [(CHUNK, CHUNK), (CHUNK + 1, 10 * CHUNK), (3 * CHUNK + 5, 1000)]
)
def test_a_long_line_is_passed_on_in_pieces(size, step):
    line = bytes(65 + index % 26 for index in range(size))
    lines = LineSplitter()
    found = [
        piece for start in range(0, size, step) for piece in lines.feed(line[start : start + step])
    ]
    found += lines.feed(b"\nnext\n")
    assert found.pop() == b"next"
    assert b"".join(found) == line
    assert max(map(len, found)) <= CHUNK


WARNING = b"[rank1]:[W1118 19:46:41.236926483 TCPStore.cpp:138] [c10d] recvValue failed\n"
STACK = (
    b"Exception raised from recvBytes at Utils.hpp:787 (most recent call first):\n"
    b"frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f in libc10.so)\n"
    b"<omitting python frames>\nframe #30: <unknown function> + 0x1098ec (0x7f in libc.so.6)\n"
)
CPP_ERROR = b"terminate called after throwing an instance of 'c10::Error'\n" + STACK


@pytest.mark.parametrize("size", [1, 7, 100, CHUNK])
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"loss 3\n" + WARNING + STACK + b"\nloss 2\n", b"loss 3\n" + WARNING + b"loss 2\n"),
        (2 * (WARNING + STACK + b"\n"), 2 * WARNING),
        (2 * WARNING + STACK + b"\ndone", 2 * WARNING + b"done"),
        (WARNING + STACK + WARNING + STACK + b"\n", 2 * WARNING),
        (b"\r 10%\r" + WARNING + STACK + b"\r 20%", b"\r 10%\r" + WARNING + b"\r 20%"),
        (WARNING + b"\nframe #1 of the video\n", WARNING + b"\nframe #1 of the video\n"),
        (WARNING + b"frame", WARNING + b"frame"),
        (WARNING + STACK[:-9], WARNING),
        (CPP_ERROR, CPP_ERROR),
    ],
    ids=[
        *("between-lines", "two", "below-another-warning", "no-empty-line", "progress-bar"),
        *("empty-line", "unfinished-line", "unfinished-stack", "error"),
    ],
)
def test_stack_filter_removes_only_stacks_below_warnings(said, shown, size):
    stacks = CppStackFilter()
    found = [stacks.feed(said[start : start + size]) for start in range(0, len(said), size)]
    assert b"".join(found) + stacks.rest() == shown


def test_stack_filter_shows_the_start_of_another_line_at_once():
    stacks = CppStackFilter()
    assert stacks.feed(WARNING + b"fra") == WARNING
    assert stacks.feed(b"gile? [y/n] ") == b"fragile? [y/n] "


@pytest.mark.parametrize("how", [{"log_copy": True}, {"tee": OUT}])
def test_cpp_stacks_are_in_the_log_file_and_not_on_the_console(tmp_path, how):
    said = WARNING + STACK + b"\ndone\n"
    run, console = run_one(tmp_path, {(0, OUT): said}, **how)
    assert run.file(0, "0/stdout.log") == said
    assert b"done" in console
    assert b"frame #" not in console


def test_cpp_stacks_are_shown_without_a_log_file(tmp_path):
    said = WARNING + STACK + b"\ndone\n"
    _, console = run_one(tmp_path, {(0, ERR): said}, log_dir=NO_FILES, tee=ERR)
    assert b"frame #0" in console


def test_without_a_copy_streams_are_inherited_and_only_the_error_file_is_named(tmp_path):
    run = Run(config_for(tmp_path / "logs"))
    logs = run.logs.open(3, {0: 0, 1: 1})
    logs.started()
    error_file = run.run_dir / "attempt_3" / "1" / "error.json"
    assert logs.streams[1] == WorkerStreams(None, None, str(error_file))
    assert error_file.parent.is_dir()
    run.logs.close(True)
    assert (run.run_dir.parent, run.run_dir.name[:4]) == (tmp_path / "logs", "job_"), "torchrun's"


def test_tee_writes_bytes_to_files_and_prefixed_lines_of_chosen_ranks_to_the_console(tmp_path):
    data = b"first\n\xff not utf-8\nno end"
    said = {(0, OUT): b"zero\n", (1, OUT): data, (1, ERR): b"error\n"}
    shown = frozenset({1})
    run, console = run_one(tmp_path, said, tee=OUT, redirects=ERR, local_ranks_filter=shown)
    assert console == b"[default1]:first\n[default1]:\xff not utf-8\n[default1]:no end\n"
    files = ("0/stdout.log", "1/stdout.log", "1/stderr.log")  # the layout is torchrun's
    assert [run.file(0, name) for name in files] == list(said.values())


def test_no_files_are_written_with_dev_null(tmp_path):
    run, console = run_one(tmp_path, {(0, OUT): b"a\n"}, log_dir=os.devnull, tee=OUT)
    assert (run.run_dir, console) == (Path(os.devnull), b"[default0]:a\n")
    logs = NodeLogs(config_for(os.devnull), run.run_dir)
    assert logs.open(0, {0: 0}).streams[0].error_file == ""
    logs.close(True)


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


def test_the_directory_of_a_run(tmp_path, monkeypatch):
    """It is absolute, a job's name cannot lead out of it, and what is wrong is said."""
    config = LaunchConfig(run_id="team/../x y" + "z" * 300, log_dir=str(tmp_path))
    assert make_run_dir(config).parent == tmp_path
    monkeypatch.chdir(tmp_path)
    assert make_run_dir(config_for("logs")).parent == tmp_path / "logs"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--log-dir .*/file cannot be used for logs .*: give"):
        make_run_dir(config_for(tmp_path / "file"))


def small_pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    return read_end, write_end


@in_loop
async def test_a_console_nobody_reads_holds_up_neither_loop_nor_worker(tmp_path, caplog):
    data = (b"x" * 99 + b"\n") * 50_000
    read_end, write_end = small_pipe()
    run = Run(config_for(tmp_path / "logs", tee=OUT), write_end)
    logs = run.logs.open(0, {0: 0})
    stream = os.dup(logs.streams[0].stdout)
    logs.started()
    await asyncio.to_thread(say, stream, data)
    await logs.drained(0.01)
    run.logs.close(True)
    assert run.file(0, "0/stdout.log") == data
    assert "The console is too slow" in caplog.text
    assert os.get_blocking(write_end), "workers share this descriptor and must be able to print"
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("log_dir", ["logs", os.devnull])
@in_loop
async def test_a_slow_console_gets_everything_in_the_end(tmp_path, log_dir, monkeypatch):
    monkeypatch.setattr(output_stream, "QUEUE", 2 * CHUNK)
    lines = [b"%0100d\n" % number for number in range(10_000)]
    read_end, write_end = small_pipe()
    run = Run(config_for(tmp_path / log_dir, tee=OUT), write_end)
    shown: list[bytes] = []
    paused: list[bool] = []
    pause = tee.Tee._pause
    monkeypatch.setattr(tee.Tee, "_pause", lambda self: paused.append(True) or pause(self))

    def read_slowly() -> None:
        with open(read_end, "rb") as stream:
            shown.extend(iter(lambda: stream.read(1000), b""))

    reader = threading.Thread(target=read_slowly)
    saying = asyncio.create_task(run.generation(0, {(0, OUT): b"".join(lines)}))
    written = run.run_dir / "attempt_0" / "0" / "stdout.log"
    while not (paused or (written.exists() and written.stat().st_size > 5 * CHUNK)):
        await asyncio.sleep(0.001)  # until there is much more than the console may keep
    reader.start()
    await saying
    run.logs.close(True)
    os.close(write_end)
    await asyncio.to_thread(reader.join)
    assert b"".join(shown) == b"".join(b"[default0]:" + line for line in lines)


def test_a_console_that_is_closed_ends_the_showing_not_the_file(tmp_path):
    read_end, write_end = os.pipe()
    run = Run(config_for(tmp_path / "logs", tee=OUT), write_end)
    os.close(read_end)
    asyncio.run(run.generation(0, {(0, OUT): b"said\n" * 50_000}))
    run.logs.close(True)
    os.close(write_end)
    assert run.file(0, "0/stdout.log") == b"said\n" * 50_000


@in_loop
async def test_a_stream_held_open_by_a_stranger_does_not_hold_up_the_end(tmp_path):
    with console_file(tmp_path / "console") as fd:
        run = Run(config_for(tmp_path / "logs", tee=OUT), fd)
        logs = run.logs.open(0, {0: 0})
        held = os.dup(logs.streams[0].stdout)
        logs.started()
        os.write(held, b"last words")
        await logs.drained(0.01)
        os.close(held)
        run.logs.close(True)
    assert run.file(0, "0/stdout.log") == b"last words"
    assert (tmp_path / "console").read_bytes() == b"[default0]:last words\n"


@in_loop
async def test_streams_of_a_worker_that_ended_are_closed_while_others_run(tmp_path):
    """In `train` the others may run for weeks."""
    filters = {"duplicate_stdout_filters": ("x",), "duplicate_stderr_filters": ("x",)}
    with console_file(tmp_path / "console") as fd:
        run = Run(config_for(tmp_path / "logs", tee=ALL, **filters), fd)
        before = len(os.listdir("/proc/self/fd"))
        logs = run.logs.open(0, {0: 0, 1: 1})
        other = os.dup(logs.streams[1].stdout)
        os.write(logs.streams[0].stdout, b"last words")
        logs.started()

        async def closed(held: int) -> None:
            while len(os.listdir("/proc/self/fd")) > before + held:
                await asyncio.sleep(0.001)

        # The other's end of the pipe, ours, its log, and the file with its matching lines.
        await asyncio.wait_for(closed(4), 10)
        assert logs.last_lines(0) == ("last words",)
        os.close(other)
        await asyncio.wait_for(closed(0), 10)
        await logs.drained(10)
        run.logs.close(True)


@in_loop
async def test_a_generation_that_never_started_is_closed_too(tmp_path):
    run = Run(config_for(tmp_path / "logs", tee=ALL))
    before = len(os.listdir("/proc/self/fd"))
    await run.logs.open(0, {0: 0, 1: 1}).drained(10)
    assert len(os.listdir("/proc/self/fd")) == before
    run.logs.close(True)


def test_a_full_disk_costs_the_file_and_not_the_stream(caplog):
    backlog = Backlog(Path("/dev/full"))
    backlog.append(b"one", shown=False)
    backlog.append(b"two", shown=False)
    assert (backlog.take(), backlog.size) == (b"onetwo", 0)
    assert caplog.messages == ["Worker output is missing in /dev/full: No space left on device."]
    backlog.append(b"x" * CHUNK, shown=False)
    assert backlog.full
    backlog.close()


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
    note = f"\n({missing} bytes are missing here: the disk was full.)\n"
    assert path.read_text() == f"one\ntw{note}five\n"


@pytest.mark.parametrize("reopen", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
@in_loop
async def test_every_kind_of_console_shows_all(kind, reopen, monkeypatch):
    if not reopen:
        monkeypatch.setattr(NonblockingWriter, "_reopened", staticmethod(lambda fd: None))
    read_end, write_end = make_console(kind)
    data = b"".join(b"%06d\n" % number for number in range(20_000))
    console = OutputStream(write_end)
    console.write(data)
    reading = asyncio.create_task(asyncio.to_thread(read_exactly, read_end, len(data)))
    await console.flushed()
    assert await reading == data
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


@in_loop
async def test_a_generation_whose_files_cannot_be_made_has_none(tmp_path, caplog):
    run = Run(config_for(tmp_path / "logs", redirects={0: ALL}, tee={1: OUT}))
    (run.run_dir / "attempt_3").write_text("")  # as good as a disk without room for a directory
    without = run.logs.open(3, {0: 0, 1: 1})
    assert without.streams[0] == WorkerStreams(None, None, "")
    assert without.streams[1].stdout is not None, "and is shown as before"
    without.close()
    after = run.logs.open(4, {0: 0, 1: 1})
    assert after.streams[0].error_file == str(run.run_dir / "attempt_4" / "0" / "error.json")
    after.close()
    run.logs.close(True)
    [warned] = caplog.messages
    assert warned.startswith("Generation 3 has no log files: ")


# --- what is known of a worker's last lines -------------------------------------------------------


def last_lines(tmp_path: Path, said: dict[Std, bytes], **config) -> tuple[str, ...]:
    """Of a worker that says this and ends, asked at once."""

    async def run() -> tuple[str, ...]:
        wanted = LaunchConfig(**{"log_dir": str(tmp_path), **config})
        logs = NodeLogs(wanted, tmp_path, consoles=(console, console))
        opened = logs.open(0, {0: 0})
        streams = opened.streams[0]
        for stream, fd in ((OUT, streams.stdout), (ERR, streams.stderr)):
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


SAID = {OUT: b"step 6\nstep 7\n", ERR: b"terminate called\n"}
LINES = ("step 6", "step 7", "terminate called")


@pytest.mark.parametrize(
    ("said", "config", "lines"),
    [
        (SAID, {"redirects": ALL}, LINES),
        (SAID, {"tee": ALL}, LINES),
        (SAID, {"tee": ALL, "log_dir": os.devnull}, LINES),
        (SAID, {"log_copy": False}, ()),  # it goes to the terminal
        (SAID, {"redirects": ERR, "log_copy": False}, LINES[-1:]),
        ({}, {"redirects": ALL}, ()),
        ({ERR: b"\xff broken \x00\n"}, {"redirects": ALL}, ("\ufffd broken \ufffd",)),
    ],
)
def test_last_output_lines_of_worker_are_found(tmp_path, said, config, lines):
    assert last_lines(tmp_path, said, **config) == lines


def test_of_much_output_both_streams_are_heard(tmp_path):
    much = b"".join(b"line %d\n" % number for number in range(10_000))
    for said, kept in (({OUT: much}, LOG_LINES_LIMIT), ({OUT: much, ERR: much}, 10)):
        lines = last_lines(tmp_path, said, redirects=ALL)
        assert lines[-kept:] == tuple(f"line {number}" for number in range(10_000 - kept, 10_000))
        assert len(lines) == LOG_LINES_LIMIT
