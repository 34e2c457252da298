"""The guard with real agents: exit codes, signals, and children that are not its own."""

import os
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.support import poll_for

HEAD = """
import os, signal, sys, time
from torchelastic.agent.guard import GUARD_LOST_SIGNAL, guarded
def say(text):
    os.write(1, f"{text}\\n".encode())
"""


def start(source, **more):
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + dedent(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def run(source, **more):
    with start(source, **more) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


ENDS = {
    "lambda: 0": (0, ""),
    "lambda: 3": (3, ""),
    "lambda: sys.exit(4)": (4, ""),
    "lambda: sys.exit()": (0, ""),
    "lambda: sys.exit('a reason')": (1, "a reason"),
    "lambda: 1 / 0": (1, "ZeroDivisionError"),
    "lambda: os.kill(os.getpid(), signal.SIGKILL)": (137, "the agent was killed by SIGKILL;"),
    "lambda: os.kill(os.getpid(), signal.SIGTERM)": (143, "the agent was killed by SIGTERM;"),
    "lambda: os.kill(os.getpid(), 50)": (178, "the agent was killed by signal 50;"),
    "lambda: os.abort()": (134, "the agent was killed by SIGABRT;"),
}


@pytest.mark.parametrize("agent", ENDS)
def test_the_guard_ends_as_the_agent_did(agent):
    code, words = ENDS[agent]
    got, out, err = run(f"sys.exit(guarded({agent}))")
    assert (got, out) == (code, "")
    assert words in err


def test_a_guard_whose_words_nobody_reads_ends_anyway():
    process = start(
        """
        os.set_blocking(2, False)
        try:
            while os.write(2, bytes(4096)):
                pass
        except BlockingIOError:
            os.set_blocking(2, True)
        sys.exit(guarded(lambda: os.kill(os.getpid(), signal.SIGKILL)))
        """
    )
    with process:
        assert process.wait(60) == 137


def test_only_the_guard_returns_and_cleans_up():
    _, out, _ = run(
        """
        import atexit
        atexit.register(say, "atexit")
        try:
            print("buffered", end=" ")
            guarded(lambda: say("agent") or 0)
        finally:
            say("finally")
        """
    )
    assert out.split() == ["buffered", "agent", "finally", "atexit"]


def test_signals_of_a_process_are_handed_on_once():
    process = start(
        """
        seen = []
        def agent():
            for number in (15, 2, 1, 3, 10, 12):
                signal.signal(number, lambda number, _: seen.append(number))
            say("ready")
            while 12 not in seen:
                signal.pause()
            say(seen)
            return 5
        sys.exit(guarded(agent))
        """
    )
    assert process.stdout.readline() == "ready\n"
    for number in (15, 2, 1, 3, 10, 12):
        before = pending(process.pid)
        process.send_signal(number)
        poll_for(lambda: pending(process.pid) == before, what="the guard to take the signal")  # noqa: B023
    out, _ = process.communicate(timeout=60)
    assert sorted(eval(out)) == [1, 2, 3, 10, 12, 15]
    assert process.returncode == 5


def pending(pid):
    """The signals that wait for a process."""
    with open(f"/proc/{pid}/status") as file:
        return [line for line in file if line.startswith("ShdPnd")]


def test_a_terminals_interrupt_reaches_the_agent_once():
    """The terminal sends it to the whole foreground group: guard and agent."""
    ours, theirs = os.openpty()
    process = start(
        """
        import fcntl, termios
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        seen = []
        def agent():
            def note(number, _):
                seen.append(number)
                say(seen)
            signal.signal(2, note)
            signal.signal(10, note)
            say("ready")
            while 10 not in seen:
                signal.pause()
            return 0
        sys.exit(guarded(agent))
        """,
        stdin=theirs,
    )
    os.close(theirs)
    assert process.stdout.readline() == "ready\n"
    os.write(ours, b"\x03")
    # The kernel passes a terminal's bytes on in its own time.
    assert process.stdout.readline() == "[2]\n"
    poll_for(
        lambda: pending(process.pid)[0].split()[1].strip("0") == "", what="the guard's interrupt"
    )
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert out == "[2, 10]\n"


def test_an_agent_whose_guard_is_lost_gets_a_signal():
    reader, writer = os.pipe()
    process = start(
        f"""
        def agent():
            signal.signal(GUARD_LOST_SIGNAL, lambda *_: os.write({writer}, b"lost") and os._exit(0))
            say("ready")
            while True:
                signal.pause()
        guarded(agent)
        """,
        pass_fds=[writer],
    )
    os.close(writer)
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert os.read(reader, 10) == b"lost"
    os.close(reader)
    process.communicate(timeout=60)


def test_an_agent_without_a_handler_dies_with_its_guard():
    process = start("guarded(lambda: say(os.getpid()) or time.sleep(1000))")
    agent = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=60)  # ends when the agent's end of the pipe is closed
    poll_for(lambda: not os.path.exists(f"/proc/{agent}"), what="the end of the agent")


def test_children_from_before_are_not_the_guards():
    """As in `sh -c 'tail -F log & exec torchelastic run …'`."""
    code, out, _ = run(
        """
        before = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
        def agent():
            os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
            return 0
        guarded(agent)
        say(os.waitpid(before, os.WNOHANG))
        os.kill(before, 9)
        os.waitpid(before, 0)
        try:
            os.wait()
        except ChildProcessError:
            say("no other")
        """
    )
    assert (code, out) == (0, "(0, 0)\nno other\n")


def test_closed_streams_are_not_taken_by_others():
    code, _, err = run(
        """
        for number in (0, 1):
            os.close(number)
        def agent():
            descriptor = os.open("/dev/zero", os.O_RDONLY)
            return descriptor
        sys.exit(guarded(agent))
        """
    )
    assert code > 2, err


def test_an_ignored_sigchld_does_not_hide_the_end():
    """`signal.SIGCHLD` may be ignored by whoever starts us."""
    code, _, _ = run("sys.exit(guarded(lambda: 6))", preexec_fn=ignore_sigchld)
    assert code == 6


def ignore_sigchld():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def test_the_guard_imports_next_to_nothing():
    _, out, _ = run(
        """
        heavy = {"asyncio", "multiprocessing", "socket", "subprocess", "json", "torch"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert out == "[]\n"
