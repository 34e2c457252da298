"""The process tree and the few calls of the kernel, each tried in a process of its own."""

import os
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.support import poll_for
from torchelastic.system import linux


def run(source, *args):
    ended = subprocess.run(
        [sys.executable, "-c", dedent(source), *args], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "1000"])
    yield process.pid
    process.kill()
    process.wait()


def test_children_are_found(child):
    for find in (linux.children, linux._children_by_stat):
        assert child in find(os.getpid())
        assert find(child) == []
    assert linux.start_time(child) >= linux.start_time(os.getpid()) > 0


def test_a_process_that_is_gone_has_no_children():
    process = subprocess.Popen(["true"])
    process.wait()
    assert linux.children(process.pid) == []
    assert linux.start_time(process.pid) == 0


@pytest.mark.parametrize(("command", "expected"), [("exit 3", 3), ("kill -9 $$", -9)])
def test_exit_codes_are_those_of_subprocess(command, expected):
    process = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    assert linux.exitcode(pidfd) is None, "it runs"
    process.stdin.close()
    assert poll_for(lambda: linux.exitcode(pidfd), what="the end") == expected
    assert linux.exitcode(pidfd) == 255, "somebody else has reaped it"
    process.wait()  # subprocess finds nothing to reap
    os.close(pidfd)


def test_a_signal_goes_to_one_thread():
    out = run(
        """
        import os, signal, threading
        from torchelastic.system import linux
        mine = signal.SIGRTMIN + 8
        signal.pthread_sigmask(signal.SIG_BLOCK, [mine])
        def wait():
            linux.signal_thread(os.getpid(), threading.get_native_id(), mine)
            print(mine in signal.sigpending())
        made = threading.Thread(target=wait)
        made.start()
        made.join()
        print(mine in signal.sigpending())
        """
    )
    assert out == "True\nFalse\n"


def test_a_signal_that_cannot_be_sent_is_an_error(monkeypatch):
    with pytest.raises(ProcessLookupError):
        linux.signal_thread(2**22 + 1, 2**22 + 1, 0)
    monkeypatch.setattr(linux, "_TGKILL", {})
    with pytest.raises(OSError, match="tgkill system call number"):
        linux.signal_thread(os.getpid(), os.getpid(), 0)


def test_everything_below_is_killed_but_what_is_to_be_kept():
    out = run(
        """
        import os, signal
        from torchelastic.system import linux
        linux.become_subreaper()
        kept = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
        reader, writer = os.pipe()
        if os.fork() == 0:
            # A chain of five, each in a session of its own and deaf to SIGTERM.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for _ in range(4):
                if os.fork():
                    break
                os.setsid()
            os.write(writer, b".")
            while True:
                signal.pause()
        os.close(writer)
        said = b""
        while len(said) < 5:
            said += os.read(reader, 10)
        linux.kill_descendants(keep={kept})
        print(os.read(reader, 1), linux.children() == [kept])
        linux.kill_descendants()
        print(linux.children())
        """
    )
    assert out == "b'' True\n[]\n"


def test_a_child_whose_parent_has_gone_before_the_call_ends_itself():
    with pytest.raises(AssertionError):
        run("from torchelastic.system import linux; linux.die_with_parent(1); print('alive')")


def test_a_child_dies_with_its_parent_unless_it_takes_that_back():
    out = run(
        """
        import os, signal, sys
        from torchelastic.system import linux
        linux.become_subreaper()
        def start(then):
            reader, writer = os.pipe()
            parent = os.fork()
            if parent == 0:
                middle = os.getpid()
                if os.fork() == 0:
                    linux.die_with_parent(middle)
                    then()
                    os.write(writer, b"ready")
                    signal.pause()
                signal.pause()
            os.read(reader, 5)
            [child] = linux.children(parent)
            os.kill(parent, 9)
            os.waitpid(parent, 0)
            return child
        dies, lives = start(lambda: None), start(linux.outlive_parent)
        print(os.waitstatus_to_exitcode(os.waitpid(dies, 0)[1]))
        print(os.waitpid(lives, os.WNOHANG))
        os.kill(lives, 9)
        """
    )
    assert out == "-9\n(0, 0)\n"


@pytest.mark.parametrize(
    "command", [("a", "b"), ("x" * 500,), ("",)], ids=["short", "long", "none"]
)
def test_a_process_shows_the_command_line_it_wants(command):
    out = run(
        """
        import sys
        from torchelastic.system import linux
        before = open("/proc/self/cmdline", "rb").read()
        assert linux.write_command_line(sys.argv[1:])
        after = open("/proc/self/cmdline", "rb").read()
        print(len(before) == len(after), after.rstrip(b"\\0"))
        """,
        *command,
    )
    same, _, shown = out.strip().partition(" ")
    assert same == "True"
    assert eval(shown).startswith("\0".join(command).encode()[:100])


def test_threads_are_named():
    assert len(linux.thread_names()) >= 1
    assert run("from torchelastic.system import linux; print(len(linux.thread_names()))") == "1\n"


def test_a_kept_child_is_not_reaped(child):
    os.kill(child, signal.SIGKILL)
    poll_for(lambda: linux._stat(child)[0] == "Z", what="a zombie")
    linux.reap(keep=linux.children())
    assert child in linux.children()
