"""The supervisor with real processes: they start, end, talk and are stopped."""

import json
import os
import signal
import sys
import time
from textwrap import dedent

import pytest

from tests.light import with_light_torch
from tests.process.bench import bench
from tests.process.jobs import state_of
from tests.support import poll_for
from torchelastic.agent.workers.supervisor import WorkerSpawn
from torchelastic.config import Entry
from torchelastic.errors import SpawnError
from torchelastic.system import linux
from torchelastic.system.cgroup import Cgroup


@pytest.fixture
def environ():
    return with_light_torch()


@pytest.fixture(params=["zygote", "plain"])
def made(request, tmp_path, environ):
    """A supervisor, with a zygote for `train.py` and without."""
    (tmp_path / "train.py").touch()
    with bench(tmp_path) as made:
        if request.param == "zygote":
            made.start_zygote(Entry("script", str(tmp_path / "train.py")), environ)
        yield made


@pytest.fixture
def plain(tmp_path):
    with bench(tmp_path) as made:
        yield made


def spawns(made, environ, source, count, **more):
    script = made.directory / "train.py"
    script.write_text(dedent(source))
    return [
        WorkerSpawn(
            local_rank=number,
            entry=Entry("script", str(script)),
            env={**environ, "RANK": str(number), "DIR": str(made.directory)},
            **more,
        )
        for number in range(count)
    ]


def gone(pid):
    return not os.path.exists(f"/proc/{pid}")


def ready(made, *names):
    """Wait until workers have made these files; returns what they say."""
    paths = [made.directory / name for name in names]
    poll_for(lambda: all(path.exists() and path.read_text() for path in paths), what=str(names))
    return [path.read_text() for path in paths]


SAY = """
import os, signal, sys, time
def say(name, text):
    path = os.path.join(os.environ["DIR"], name)
    with open(path + ".part", "w") as file:
        file.write(str(text))
    os.rename(path + ".part", path)
rank = os.environ["RANK"]
"""


def test_workers_are_children_in_sessions_of_their_own(made, environ):
    source = SAY + "say(rank, [os.getppid(), os.getpgid(0), os.getsid(0)]); signal.pause()"
    pids = made.do(made.supervisor.start(spawns(made, environ, source, 2)))
    assert sorted(pids) == [0, 1]
    assert made.supervisor.alive == (0, 1)
    for rank, said in enumerate(ready(made, "0", "1")):
        assert json.loads(said) == [os.getpid(), pids[rank], pids[rank]]
    made.do(made.supervisor.stop(timeout=60))
    assert made.supervisor.alive == ()
    assert [exit.exitcode for exit in made.exits] == [-signal.SIGTERM] * 2
    assert all(gone(pid) for pid in pids.values())


def test_workers_that_die_at_once_are_all_reported(made, environ):
    source = SAY + "say(rank, 'up'); signal.pause()"
    pids = made.do(made.supervisor.start(spawns(made, environ, source, 3)))
    ready(made, "0", "1", "2")
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    made.until(lambda: len(made.exits) == 3, "three ends")
    assert {(exit.local_rank, exit.pid, exit.exitcode) for exit in made.exits} == {
        (rank, pid, -signal.SIGKILL) for rank, pid in pids.items()
    }


def test_a_failure_is_reported_before_the_end(made, environ, tmp_path):
    error_file = str(tmp_path / "error.json")
    ended = []
    made.supervisor._on_exit = lambda exit: ended.append((exit.exitcode, list(made.messages)))
    environ["TORCHELASTIC_ERROR_FILE"] = error_file
    made.do(made.supervisor.start(spawns(made, environ, "raise RuntimeError('boom')", 1)))
    made.until(lambda: ended, "the end")
    exitcode, messages = ended[0]
    assert exitcode == 1
    [(local_rank, message)] = messages
    assert (local_rank, message["type"]) == (0, "failure")
    assert message["message"] == "RuntimeError: boom"
    assert "train.py" in message["traceback"]
    assert "torchelastic" not in message["traceback"].replace(str(tmp_path), "")
    with open(error_file) as file:
        said = json.load(file)["message"]
    assert said["message"] == "RuntimeError: boom"
    assert said["extraInfo"]["py_callstack"] == message["traceback"]
    assert abs(int(said["extraInfo"]["timestamp"]) - time.time()) < 60


#: By rank: exit codes; an extension that prints an error and goes on; a thread that fails, and a
#: child: neither is the end of this worker.
NO_FAILURE = """
import ctypes, os, sys, threading
rank = os.environ["RANK"]
if rank == "1":
    os._exit(3)
if rank == "2":
    ctypes.pythonapi.PyRun_SimpleString(b"raise ValueError('only printed')")
if rank == "3":
    def fail():
        raise RuntimeError('in a thread')
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    pid = os.fork()
    if pid == 0:
        raise RuntimeError('in a child')
    os.waitpid(pid, 0)
sys.exit(3)
"""


def test_exit_without_exception_is_not_reported_as_a_failure(made, environ, tmp_path):
    environ["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "error.json")
    made.do(made.supervisor.start(spawns(made, environ, NO_FAILURE, 4)))
    made.until(lambda: len(made.exits) == 4, "all ends")
    assert [exit.exitcode for exit in made.exits] == [3] * 4
    assert all(message == {"type": "returned"} for _, message in made.messages)
    assert not (tmp_path / "error.json").exists()


def test_messages_arrive_in_order_and_junk_is_ignored(plain, environ):
    source = """
    import os, socket
    from torchelastic.worker import channel
    channel.send({"type": "progress", "step": 0})
    raw = socket.socket(fileno=os.dup(int(os.environ["TORCHELASTIC_CHANNEL_FD"])))
    raw.send(b"junk")
    raw.send(b"[1, 2]")
    raw.send(b"x" * 150_000)
    pid = os.fork()
    if pid == 0:
        channel.send({"type": "from a child"})
        os._exit(0)
    os.waitpid(pid, 0)
    for step in range(1, 500):
        channel.send({"type": "progress", "step": step}, timeout=10)
    """
    plain.do(plain.supervisor.start(spawns(plain, environ, source, 1)))
    plain.until(lambda: plain.exits, "the end")
    *steps, last = [message for _, message in plain.messages]
    assert [message["step"] for message in steps] == list(range(500))
    assert last == {"type": "returned"}


def test_the_last_words_are_heard_however_many_came_before(plain, environ):
    source = """
    from torchelastic.worker import channel
    for step in range(100):
        channel.send({"step": step})
    raise RuntimeError("the end")
    """
    plain.do(plain.supervisor.start(spawns(plain, environ, source, 1)))
    pid = plain.supervisor._workers[0].pid
    poll_for(lambda: state_of(pid) == "Z", what="the end of the worker")  # nobody has read yet
    plain.until(lambda: plain.exits, "the end")
    assert len(plain.messages) == 101
    assert plain.messages[-1][1]["message"] == "RuntimeError: the end"


def test_a_mistake_in_handling_a_message_costs_neither_the_next_nor_the_end(plain, environ, caplog):
    heard = []

    def hear(local_rank, message):
        heard.append(message["number"])
        raise ValueError("a mistake of ours")

    plain.supervisor._on_message = hear
    source = """
        from torchelastic.worker import channel
        channel.adopt()
        for number in range(3):
            channel.send({"number": number})
    """
    plain.do(plain.supervisor.start(spawns(plain, environ, source, 1)))
    plain.until(lambda: plain.exits, "the end")
    assert heard == [0, 1, 2]
    assert "Could not handle a message from worker 0." in caplog.text


def test_a_worker_that_sends_more_than_is_read_is_not_held_up(plain, environ):
    source = """
    from torchelastic.worker import channel
    for step in range(20_000):
        channel.send({"step": step})
    """
    plain.do(plain.supervisor.start(spawns(plain, environ, source, 1)))
    # The loop does not run: nobody reads. The worker ends all the same.
    pid = plain.supervisor._workers[0].pid
    poll_for(lambda: state_of(pid) == "Z", what="the end of the worker")


def test_one_that_cannot_start_takes_the_others_with_it(plain, environ):
    good = spawns(plain, environ, "import signal; signal.pause()", 1)
    bad = WorkerSpawn(local_rank=1, entry=Entry("program", "/no/such/thing"), env=environ)
    with pytest.raises(SpawnError, match="/no/such/thing cannot be started"):
        plain.do(plain.supervisor.start([*good, bad]))
    assert plain.supervisor.alive == ()
    assert plain.exits == []  # they did not fail: we killed them


def test_a_program_gets_its_streams_environment_and_nothing_else(plain, environ, tmp_path):
    extra = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(extra, True)
    command = "cat; echo $RANK $PYTHONPATH; exec ls /proc/self/fd"
    entry = Entry("program", "sh", ("-c", command))
    ran = plain.run(entry, {"PATH": environ["PATH"], "RANK": "4"}, stdin="in\n")
    os.close(extra)
    said = ran.stdout.splitlines()
    assert said[:2] == ["in", "4"]
    assert len(said[2:]) == 5, "standard streams, the channel, and the directory that ls reads"


def test_a_worker_that_ignores_the_signal_is_killed_after_the_timeout(made, environ):
    source = SAY + "signal.signal(15, signal.SIG_IGN); say(rank, 'up')\nwhile True: signal.pause()"
    made.do(made.supervisor.start(spawns(made, environ, source, 2)))
    ready(made, "0", "1")
    began = time.monotonic()
    made.do(made.supervisor.stop(timeout=0.3))
    assert 0.3 <= time.monotonic() - began < 30
    assert [exit.exitcode for exit in made.exits] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("signum", "asked"), [(0, "they were told to leave"), (signal.SIGUSR1, "SIGUSR1")]
)
def test_the_message_about_workers_that_do_not_end(plain, environ, caplog, signum, asked):
    source = SAY + "signal.signal(10, signal.SIG_IGN); say(rank, 'up'); signal.pause()"
    plain.do(plain.supervisor.start(spawns(plain, environ, source, 1)))
    ready(plain, "0")
    with caplog.at_level("INFO"):
        plain.do(plain.supervisor.stop(signum, timeout=0.1))
    assert f"that have not exited 0.1 s after {asked}: 0" in caplog.text


def test_the_end_of_a_worker_does_not_hide_another_one_in_its_place(made, environ):
    source = SAY + "say(rank, 'up'); signal.pause()"
    first = made.do(made.supervisor.start(spawns(made, environ, source, 1)))
    ready(made, "0")
    second = made.do(made.supervisor.start(spawns(made, environ, source, 1)))
    os.kill(first[0], signal.SIGKILL)
    made.until(lambda: made.exits, "the end of the first")
    assert made.exits[0].pid == first[0]
    assert made.supervisor.pid(0) == second[0]
    made.do(made.supervisor.stop(timeout=60))


#: Rank 0 goes when it is asked to on its channel, others when they get a signal.
ASKED = """
import time
from torchelastic.worker import channel
if rank == "0":
    link = channel.link()
    say(rank, "up")
    link.receive()
    say("before", os.path.exists(os.path.join(os.environ["DIR"], "signalled")))
    sys.exit(7)
signal.signal(15, lambda *_: (say("signalled", 1), sys.exit(8)))
say(rank, "up")
while True: signal.pause()
"""


def test_those_that_were_told_go_before_the_others_get_the_signal(made, environ):
    made.do(made.supervisor.start(spawns(made, environ, SAY + ASKED, 2)))
    ready(made, "0", "1")
    made.supervisor.tell(0, {"type": "leave"})
    made.do(made.supervisor.stop(timeout=60, told=[0]))
    assert ready(made, "before") == ["False"]
    assert [(exit.local_rank, exit.exitcode) for exit in made.exits] == [(0, 7), (1, 8)]


def test_those_that_were_told_and_do_not_go_are_killed_in_time(made, environ):
    made.do(made.supervisor.start(spawns(made, environ, SAY + ASKED, 2)))
    ready(made, "0", "1")
    made.do(made.supervisor.stop(timeout=0.3, told=[0]))
    assert not made.supervisor.alive


def test_a_frozen_worker_sees_the_signal(made, environ):
    source = SAY + "signal.signal(15, lambda *_: sys.exit(9)); say(rank, 'up'); signal.pause()"
    pids = made.do(made.supervisor.start(spawns(made, environ, source, 1)))
    ready(made, "0")
    os.kill(pids[0], signal.SIGSTOP)
    poll_for(lambda: state_of(pids[0]) == "T", what="a stopped worker")
    made.do(made.supervisor.stop(timeout=60))
    assert made.exits[0].exitcode == 9


def test_a_signal_reaches_the_whole_process_group(made, environ):
    source = SAY + (
        "if os.fork() == 0: rank = 'child'\n"
        "signal.signal(signal.SIGUSR1, lambda *_: say(rank, 'heard'))\n"
        "say(rank + '-up', 'up')\n"
        "while True: signal.pause()"
    )
    made.do(made.supervisor.start(spawns(made, environ, source, 1)))
    ready(made, "0-up", "child-up")
    made.supervisor.signal(signal.SIGUSR1)
    ready(made, "0", "child")


def test_a_worker_signalled_the_moment_it_starts_ends(made, environ):
    for _ in range(5):
        made.do(made.supervisor.start(spawns(made, environ, "import time; time.sleep(60)", 2)))
        made.do(made.supervisor.stop(timeout=60))
    assert len(made.exits) == 10


STRAYS = (
    SAY
    + """
import subprocess
subprocess.Popen(["sleep", "1000"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(rank, os.getpid())
        while True: signal.pause()
    os._exit(0)
os.wait()
"""
)


@pytest.mark.parametrize("ending", ["", "while True: signal.pause()"])
def test_nothing_that_a_worker_has_started_is_left(made, environ, ending):
    made.do(made.supervisor.start(spawns(made, environ, STRAYS + ending, 2)))
    strays = [int(pid) for pid in ready(made, "0", "1")]
    if not ending:
        made.until(lambda: len(made.exits) == 2, "the workers' own end")
        assert not any(gone(pid) for pid in strays), "others may still need them"
    before = made.supervisor.exempt
    made.do(made.supervisor.stop(timeout=0.2))
    assert all(gone(pid) for pid in strays)
    assert set(linux.children()) <= before


def test_a_strays_end_leaves_no_zombie(plain, environ):
    source = (
        SAY
        + """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        say("stray", os.getpid())
        os._exit(0)
    os._exit(0)
os.wait()
signal.pause()
"""
    )
    plain.do(plain.supervisor.start(spawns(plain, environ, source, 1)))
    [stray] = ready(plain, "stray")
    plain.until(lambda: gone(stray), "the zombie")
    assert plain.supervisor.alive == (0,)


def test_helpers_are_left_alone(plain, environ):
    helper = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    plain.supervisor.exempt.add(helper)
    plain.do(plain.supervisor.start(spawns(plain, environ, "pass", 1)))
    plain.do(plain.supervisor.stop(timeout=10))
    assert os.waitpid(helper, os.WNOHANG) == (0, 0)
    os.kill(helper, signal.SIGKILL)
    os.waitpid(helper, 0)


def test_affinity_is_set_before_the_program_runs(made, environ):
    cpu = min(os.sched_getaffinity(0))
    source = SAY + "say(rank, sorted(os.sched_getaffinity(0)))"
    environ["OMP_NUM_THREADS"] = "1"
    made.do(made.supervisor.start(spawns(made, environ, source, 1, cpus=frozenset({cpu}))))
    assert ready(made, "0") == [str([cpu])]


@pytest.mark.needs("cgroup")
@pytest.mark.parametrize("warm", [True, False])
def test_workers_are_in_the_cgroup_before_the_program_runs(tmp_path, environ, warm):
    cgroup = Cgroup.create()
    assert cgroup is not None
    with bench(tmp_path, cgroup) as made:
        if warm:
            made.start_zygote(Entry("script", str(tmp_path / "train.py")), environ)
        source = SAY + "say(rank, open('/proc/self/cgroup').read()); signal.pause()"
        pids = made.do(made.supervisor.start(spawns(made, environ, source, 2)))
        assert all(os.path.basename(cgroup.path) in said for said in ready(made, "0", "1"))
        assert sorted(cgroup.processes()) == sorted(pids.values())
        made.do(made.supervisor.stop(timeout=60))
        assert cgroup.processes() == []
    assert not os.path.exists(cgroup.path)


def test_python_is_the_one_asked_for(plain, environ, tmp_path, monkeypatch):
    wrapper = tmp_path / "my-python"
    wrapper.write_text(f'#!/bin/sh\nWRAPPED=yes exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(wrapper))
    source = SAY + "say(rank, os.environ['WRAPPED'])"
    plain.do(plain.supervisor.start(spawns(plain, environ, source, 1)))
    assert ready(plain, "0") == ["yes"]
