"""The stacks of a process, written by itself at a signal, whatever it hangs in."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import SOAK, poll_for
from tests.unit.agent.cast import Workers, in_loop
from torchelastic.agent.watch import stack_reader
from torchelastic.agent.watch.stack_reader import FROZEN, NOTHING, Stacks, is_frozen, written_stack
from torchelastic.system import linux
from torchelastic.worker import orders, stack_dump

#: Hangs in C code that holds the GIL; in a system call; in a loop; waiting for a thread.
PROGRAMS = {
    "holds_the_gil": """import ctypes
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex), c.pthread_mutex_lock(mutex)""",
    "waits": "import os; os.read(os.pipe()[0], 1)",
    "computes": "while True: pass",
    "joins": "import threading; made = threading.Thread(target=run); made.start(); made.join()",
}
RECURSION = """
    import threading
    def down(depth):
        return depth and down(depth - 1)
    def again():
        while True:
            made = {}
            exec("def deeper(depth): return depth and deeper(depth - 1)", made)
            down(400), made["deeper"](300)
    for _ in range(3):
        threading.Thread(target=again, daemon=True).start()
    again()"""
SCRIPT = """
from torchelastic.worker import stack_dump
stack_dump.adopt()
def run():
    import time
    time.sleep(600)
def hangs():
    print("up", flush=True)
    {}
hangs()
"""


@pytest.fixture
def started():
    """Starts a program with its stack memory; both are gone in the end."""
    made = []

    def start(code):
        memory = stack_dump.create()
        env = {**os.environ, stack_dump.VARIABLE: str(memory)}
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=env, pass_fds=[memory], stdout=subprocess.PIPE
        )
        made.append((process, memory))
        assert process.stdout.readline() == b"up\n"
        return process, memory

    yield start
    for process, memory in made:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(memory)


@pytest.fixture(autouse=True)
def no_reader_of_stacks(monkeypatch):
    monkeypatch.setattr(stack_reader.shutil, "which", lambda name: None)
    monkeypatch.setattr(stack_reader, "STACKS_TIMEOUT", 30.0)


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_a_stack_is_written_and_the_process_goes_on(started, code):
    process, memory = started(SCRIPT.format(code))
    for _ in range(2):
        stack = asyncio.run(written_stack(process.pid, memory))
        assert "in hangs" in stack
        assert "in run" not in stack, "another thread's frames are not read while it runs"
        assert process.poll() is None
    assert os.fstat(memory).st_size < 8192, "the second is written over the first"


def test_threads_that_run_survive_being_looked_at(started):
    """Their frames come and go: whoever read them from another thread would read freed memory."""
    process, memory = started(SCRIPT.format(RECURSION))
    main = Path(f"/proc/{process.pid}")
    for _ in range(100 * SOAK):
        linux.signal_thread(process.pid, process.pid, stack_dump.SIGNAL)
        while process.poll() is None and stack_reader._signals(main, "SigPnd"):
            os.sched_yield()
        assert process.poll() is None
    assert "most recent call first" in asyncio.run(written_stack(process.pid, memory))


@pytest.mark.parametrize(
    "code",
    [
        "print('up', flush=True); import time; time.sleep(600)",
        SCRIPT.format("import os; os.closerange(3, 100); print('up', flush=True); run()").replace(
            '    print("up", flush=True)\n', ""
        ),
    ],
    ids=["it is not prepared", "its descriptors are closed"],
)
def test_a_process_that_would_be_harmed_gets_no_signal(started, code):
    process, memory = started(code)
    assert asyncio.run(written_stack(process.pid, memory)) == ""
    assert process.poll() is None


def test_children_do_not_know_of_the_memory(started):
    code = SCRIPT.format("import os; os.system('echo fd=$TORCHELASTIC_STACKS_FD'); run()")
    process, _ = started(code)
    assert process.stdout.readline() == b"fd=\n"


# --- of a node's workers -------------------------------------------------------------------------


class OneWorker(Workers):
    """As an in-process one it writes what it is told, and answers."""

    def __init__(self, process=None, memory=None, *, says=None):
        pid = process.pid if process is not None else None
        super().__init__(pid, is_in_process=says is not None, stack_memory=memory)
        self.says = says

    def tell(self, local_rank, order, fds=()):
        if isinstance(order, orders.Dump):
            os.write(fds[0], self.says.encode())
        elif self.says:
            self.pongs[local_rank] = orders.Pong(waiting=False, number=order.number)


def stack(workers):
    return asyncio.run(Stacks(workers).of(0))


def test_a_control_thread_is_asked_first_and_one_that_does_not_answer_gets_the_signal(
    started, monkeypatch
):
    process, memory = started(SCRIPT.format("run()"))
    assert stack(OneWorker(process, memory, says="as it says")) == "as it says"
    monkeypatch.setattr(stack_reader, "ANSWER_TIMEOUT", 0.01)
    told = stack(OneWorker(process, memory, says=""))
    assert told.startswith("main thread, most recent call first:\n")
    assert "in hangs" in told


@pytest.mark.parametrize("late", [False, True], ids=["before", "while it is asked"])
def test_one_that_is_to_be_killed_gets_no_signal(late, started, monkeypatch):
    """It stands still in the handler of its timer, out of which a signal would let it go on."""
    monkeypatch.setattr(stack_reader, "ANSWER_TIMEOUT", 0.01)
    monkeypatch.setattr(linux, "signal_thread", lambda *_: pytest.fail("it was sent a signal"))
    process, memory = started(SCRIPT.format("run()"))
    workers = OneWorker(process, memory, says="")
    if late:
        workers.tell = lambda *_: workers.condemn(0, "", "as it wrote")
    else:
        workers.condemn(0, "", "as it wrote")
    assert stack(workers) == (NOTHING if late else "as it wrote")


def test_a_frozen_one_is_said_to_be(started):
    process, memory = started(SCRIPT.format("run()"))
    assert not is_frozen(process.pid)
    process.send_signal(signal.SIGSTOP)
    poll_for(lambda: is_frozen(process.pid), what="a frozen process")
    assert stack(OneWorker(process, memory)) == FROZEN
    process.kill()
    process.wait()
    assert not is_frozen(process.pid)
    assert not is_frozen(None)
    assert asyncio.run(written_stack(process.pid, memory)) == "", "it is gone"


def test_of_a_program_none_can_be_read(started):
    process, _ = started("print('up', flush=True); import time; time.sleep(600)")
    assert stack(OneWorker(process)) == NOTHING
    assert stack(OneWorker()) == "it has ended"


def test_a_reader_that_cannot_be_run_is_named_and_harms_nobody(tmp_path, monkeypatch, caplog):
    program = tmp_path / "py-spy"
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o755)
    monkeypatch.setattr(stack_reader.shutil, "which", lambda name: str(program))
    assert asyncio.run(stack_reader.stack_of(os.getpid(), set())) == ""
    assert "py-spy cannot be started" in caplog.text


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A py-spy that tells its pid, waits for a line, and shows a stack."""
    go, told = tmp_path / "go", tmp_path / "pid"
    os.mkfifo(go)
    program = tmp_path / "py-spy"
    program.write_text(
        f"#!/bin/sh\necho $$ > {told}.new\nmv {told}.new {told}\nread line < {go}\n"
        'echo "in train.py"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(stack_reader.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(stack_reader, "PY_SPY_TIMEOUT", 60.0)
    return go, told


async def its_pid(told):
    while not told.exists():
        await asyncio.sleep(0.002)
    return int(told.read_text())


@in_loop
async def test_stack_reader_process_is_not_reaped_as_orphan(reader):
    go, told = reader
    workers = OneWorker()
    reading = asyncio.create_task(stack_reader.stack_of(os.getpid(), workers.helpers))
    pid = await its_pid(told)
    assert workers.helpers == {pid}
    go.write_text("\n")
    poll_for(lambda: stack_reader._state(Path(f"/proc/{pid}")) == "Z", what="its end")
    linux.reap(keep=workers.helpers)  # as the supervisor does at that
    assert stack_reader._state(Path(f"/proc/{pid}")) == "Z"
    assert await reading == "in train.py\n"
    assert workers.helpers == set()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("cancelled", [False, True], ids=["too slow", "cancelled"])
@in_loop
async def test_stack_reader_process_is_killed_after_time_limit(cancelled, reader, monkeypatch):
    _, told = reader
    waited, wait = [], asyncio.wait

    async def no_time(futures, timeout):
        if not waited and not cancelled:
            await its_pid(told)
            timeout = 0
        waited.append(timeout)
        return await wait(futures, timeout=timeout)

    helpers = set()
    monkeypatch.setattr(stack_reader.asyncio, "wait", no_time)
    reading = asyncio.create_task(stack_reader.stack_of(os.getpid(), helpers))
    pid = await its_pid(told)
    if cancelled:
        reading.cancel()
    [found] = await asyncio.gather(reading, return_exceptions=True)
    assert isinstance(found, asyncio.CancelledError) if cancelled else found == ""
    assert helpers == set()
    assert not Path(f"/proc/{pid}").exists()


def test_an_answer_to_an_earlier_question_is_none():
    workers = OneWorker(says="")
    workers.pongs[0] = orders.Pong(waiting=True, number=0)
    assert asyncio.run(stack_reader.answered(workers, 0, 0.01)) is None
