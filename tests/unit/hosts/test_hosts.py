"""Jobs on several machines: the hosts, the plan, the launcher, and the program on each host."""

import asyncio
import doctest
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support import poll_for
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import EXIT_USAGE, ConfigError
from torchelastic.hosts import host_launcher, host_list, host_plan, remote
from torchelastic.hosts.host_list import HostSlots, parse_hosts, parse_lines, read_hosts
from torchelastic.hosts.host_plan import (
    ANSWER_TIMEOUT,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STEADY,
    Connect,
    HostState,
    LeaveHost,
    StartAgent,
    all_refused,
    failed,
    plan,
)


def test_doctests_hold():
    assert doctest.testmod(host_list).failed == 0
    assert doctest.testmod(host_launcher).failed == 0


@pytest.mark.parametrize(
    ("text", "target", "slots", "address"),
    [
        ("host1", "host1", 0, "host1"),
        ("host1:8", "host1", 8, "host1"),
        ("ada@host1.example:4", "ada@host1.example", 4, "host1.example"),
        ("10.0.0.7:2", "10.0.0.7", 2, "10.0.0.7"),
        ("[fd00::1]:2", "fd00::1", 2, "fd00::1"),
        ("ada@[fd00::1]", "ada@fd00::1", 0, "fd00::1"),
    ],
)
def test_a_host(text, target, slots, address):
    [host] = parse_hosts([text])
    assert (host, host.address) == (HostSlots(target, slots), address)


@pytest.mark.parametrize(
    "text",
    ["host:0", "host:x", "-oProxyCommand=x", "-oProxyCommand=x@host", "a b", "host:8:8", "@x"],
)
def test_text_that_is_not_a_host_is_refused(text):
    with pytest.raises(ConfigError, match="is not a host"):
        parse_hosts([text])


def test_a_host_is_listed_once():
    with pytest.raises(ConfigError, match="listed twice"):
        parse_hosts(["a:1", "b", "a:2"])


def test_localhost_is_not_mixed_with_other_machines():
    """The others would look for the job on themselves, and found a second one."""
    assert len(parse_hosts(["localhost:1", "127.0.0.1:1"])) == 2
    for local in ("localhost:2", "127.0.0.1", "[::1]:2"):
        with pytest.raises(ConfigError, match="is a different machine for each host"):
            parse_hosts([local, "host2:2"])


def test_a_file_has_a_host_on_each_line():
    assert parse_lines("# rack 7\na:8  # fast\n\nb\n") == (HostSlots("a", 8), HostSlots("b"))


def test_hosts_come_from_a_file_or_a_command(tmp_path):
    (tmp_path / "hosts").write_text("a:2\n")
    assert read_hosts(str(tmp_path / "hosts")) == (HostSlots("a", 2),)
    assert read_hosts("echo a:2; echo b") == (HostSlots("a", 2), HostSlots("b"))
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho c:1\n")
    program.chmod(0o755)
    assert read_hosts(str(program)) == (HostSlots("c", 1),)
    with pytest.raises(ConfigError, match=r"failed with exit code 3 \(sorry\): name a file"):
        read_hosts("echo sorry >&2; exit 3")
    assert read_hosts(f"echo a # {'long' * 100}") == (HostSlots("a"),)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    for source in (str(tmp_path / "binary"), "printf '\\377\\376'"):
        with pytest.raises(ConfigError, match="is not a host"):
            read_hosts(source)


def test_a_command_that_does_not_end_is_killed_with_what_it_started(monkeypatch):
    monkeypatch.setattr(host_list, "COMMAND_TIMEOUT", 0.2)
    with pytest.raises(ConfigError, match=r"did not end within 0\.2 s: make it faster"):
        read_hosts("sleep 600 | cat")


# --- the plan -------------------------------------------------------------------------------------


A, B, C = HOSTS = parse_hosts(["ada@a:2", "b:2", "c"])
NOW = 100.0


def states(**status):
    targets = {"a": "ada@a", "b": "b", "c": "c"}
    return {
        targets[name]: state if isinstance(state, HostState) else HostState(state, NOW - 1)
        for name, state in status.items()
    }


def test_all_hosts_are_called_and_the_first_that_answers_in_time_founds_the_job():
    assert plan(HOSTS, {}, [], NOW) == [Connect(A), Connect(B), Connect(C)]
    called = states(a=HostState("calling", NOW - ANSWER_TIMEOUT + 1), b="ready", c="calling")
    assert plan(HOSTS, called, [], NOW) == []
    assert plan(HOSTS, called, [], NOW + 1) == [StartAgent(B, ("b",))]


def test_there_is_one_founder_however_slow_it_is():
    founding = states(a="ready", b=HostState("starting", NOW - 1000), c="ready")
    assert plan(HOSTS, founding, [], NOW) == []
    gone = states(a="ready", b=failed(HostState("starting", 0.0), NOW), c="calling")
    assert plan(HOSTS, gone, [], NOW) == [StartAgent(A, ("a",))]


def test_the_others_follow_once_it_runs():
    answered = states(a="running", b="ready", c="ready")
    assert plan(HOSTS, answered, ["ada@a"], NOW) == [StartAgent(B, ("a",)), StartAgent(C, ("a",))]


def test_a_job_that_may_run_is_founded_when_all_had_time_to_say_so():
    answered = states(a="ready", b=HostState("calling", NOW - ANSWER_TIMEOUT + 1))
    assert plan((A, B), answered, [], NOW, may_run=True) == []
    late = plan((A, B), answered, [], NOW + 1, may_run=True)
    assert late == [StartAgent(A, ("a",))] == plan((A, B), answered, [], NOW)


def test_a_new_host_looks_for_the_job_where_it_runs():
    running = states(a="ready", b="running", c="running")
    assert plan(HOSTS, running, ["b", "c"], NOW) == [StartAgent(A, ("b", "c"))]
    many = parse_hosts([f"h{number}" for number in range(9)])
    told = plan(many, {"h8": HostState("ready", NOW)}, [h.target for h in many[:8]], NOW)[-1]
    assert told == StartAgent(many[8], ("h0", "h1", "h2"))


def test_a_host_that_failed_waits_for_its_pause():
    gone = failed(HostState("running", NOW - 1), NOW)
    known = {**states(b="running", c="running"), "ada@a": gone}
    assert plan(HOSTS, known, ["b", "c"], NOW + FIRST_PAUSE - 0.1) == []
    assert plan(HOSTS, known, ["b", "c"], NOW + FIRST_PAUSE) == [Connect(A)]


def test_all_hosts_failed_and_meet_where_the_last_one_ran():
    answered = states(a="ready", b="ready")
    assert plan((A, B), answered, ["b"], NOW) == [StartAgent(A, ("b",)), StartAgent(B, ("b",))]


def test_endpoints_of_hosts_no_longer_listed_are_forgotten():
    assert plan((C,), states(c="ready"), ["ada@a", "b"], NOW) == [StartAgent(C, ("c",))]


def test_a_host_that_is_not_listed_any_more_leaves_once():
    running = states(a="running", b="running")
    assert plan((B,), running, ["ada@a", "b"], NOW) == [LeaveHost("ada@a")]
    assert plan((B,), states(a="leaving", b="running"), ["b"], NOW) == []
    for status in ("calling", "ready", "starting", "running"):
        assert plan((), states(a=status), ["ada@a"], NOW) == [LeaveHost("ada@a")]


def test_a_host_that_comes_back_is_started_when_it_has_left():
    assert plan(HOSTS, states(a="leaving", b="running", c="running"), ["b", "c"], NOW) == []
    assert plan(HOSTS, states(b="running", c="running"), ["b", "c"], NOW) == [Connect(A)]


def test_pauses_double_until_a_host_runs_steadily():
    state, pauses = HostState("starting", 0.0), []
    for _ in range(10):
        state = failed(state, NOW)
        pauses.append(state.retry_at - NOW)
        state = HostState("running", NOW - 1, state.failures)
    assert pauses[:4] == [5, 10, 20, 40]
    assert pauses[-1] == LONGEST_PAUSE
    steady = HostState("running", NOW - STEADY - 1, 7)
    assert failed(steady, NOW).failures == 1


def test_a_job_that_every_host_refuses_cannot_run():
    refused = failed(HostState("starting", 0.0), NOW, refused=True)
    assert all_refused((A, B), states(a=refused, b=refused))
    assert not all_refused((A, B), states(a=refused, b="calling"))
    assert not all_refused((A, B), states(a=refused))
    assert not all_refused((), {})


# --- the launcher ---------------------------------------------------------------------------------


#: Waits for its turn, answers, takes the request, starts, and ends when it is told how.
HOST = """
import subprocess, sys, time
from pathlib import Path
place, *marks = sys.argv[1:]
place, (READY, STARTED, TAKEN_OVER, ENDED) = Path(place), (f"\\0{mark}" for mark in marks)
def wait_for(*names):
    while not (found := [place / name for name in names if (place / name).exists()]):
        time.sleep(0.01)
    return found[0].read_text()
def say(text):
    print(text, flush=True)
hello = sys.stdin.readline()
if code := wait_for("answer", "nothing"):
    sys.exit(int(code))
if (place / "runs").exists():
    say(TAKEN_OVER)
else:
    say(READY)
    line = sys.stdin.readline()
    if not line:
        sys.exit(143)
    (place / "request.new").write_text(line)
    (place / "request.new").rename(place / "request")
    say(STARTED)
if (place / "hold").exists():
    hold = f"while [ -e {place}/hold ]; do sleep 0.05; done"
    subprocess.Popen(["sh", "-c", hold], stdout=subprocess.DEVNULL)
code, *marks = wait_for("end").split()
if marks:
    say(ENDED)
sys.exit(int(code))
"""


class Hosts:
    """A launcher in a thread, and hosts whose turns the test decides."""

    def __init__(self, directory: Path, monkeypatch, names: str, **changes) -> None:
        self.directory = directory
        hosts = parse_hosts(names.split())
        for host in hosts:
            (directory / host.target).mkdir()
        monkeypatch.setattr(host_launcher, "command_for", self._command)
        monkeypatch.setattr(host_plan, "FIRST_PAUSE", 0.05)
        job = host_launcher.HostJob(
            config=LaunchConfig(
                1, len(hosts), 1, run_id="job", rdzv_endpoint="a:1", shutdown_timeout=0.1
            ),
            entry=Entry("script", "train.py"),
            workers=1,
            hosts=hosts,
            secret="0123456789abcdef",
            **changes,
        )
        self.codes: list[int] = []
        self._thread = threading.Thread(target=lambda: self.codes.append(self._run(job)))
        self._thread.start()

    def _run(self, job) -> int:
        async def run() -> int:
            asyncio.get_running_loop().add_signal_handler = lambda *_: None  # not a main thread
            return await host_launcher._Launcher(job).run()

        return asyncio.run(run())

    def _command(self, host: HostSlots) -> list[str]:
        marks = [mark.removeprefix("\0") for mark in remote.MARKS]
        return [sys.executable, "-S", "-c", HOST, str(self.directory / host.target), *marks]

    def tell(self, host: str, name: str, text: str = "") -> None:
        path = self.directory / host / name
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    def asked(self, host: str) -> bool:
        return (self.directory / host / "request").exists()

    def endpoints(self, host: str) -> str:
        poll_for(lambda: self.asked(host), what=f"a request to {host}")
        request = json.loads((self.directory / host / "request").read_text())
        return ",".join(
            at.partition(":")[0] for at in request["config"]["rdzv_endpoint"].split(",")
        )

    def result(self) -> int:
        self._thread.join(20)
        assert not self._thread.is_alive(), "the launcher has not ended"
        return self.codes[0]


def test_the_first_host_that_answers_founds_the_job_and_no_other(tmp_path, monkeypatch):
    """However late the first of the list answers: two founders would be two jobs with one id."""
    monkeypatch.setattr(host_plan, "ANSWER_TIMEOUT", 0.0)
    them = Hosts(tmp_path, monkeypatch, "a b")
    them.tell("b", "answer")
    assert them.endpoints("b") == "b"
    assert not them.asked("a")
    them.tell("a", "answer")
    assert them.endpoints("a") == "b"
    for host in "ab":
        them.tell(host, "end", "0 whole-job")
    assert them.result() == 0


def test_a_job_that_an_earlier_launcher_started_is_not_founded_again(tmp_path, monkeypatch):
    them = Hosts(tmp_path, monkeypatch, "a b", may_run=True)
    them.tell("b", "runs")
    them.tell("a", "answer")
    them.tell("b", "answer")
    assert them.endpoints("a") == "b"
    for host in "ab":
        them.tell(host, "end", "1 whole-job")
    assert them.result() == 1


def test_an_ssh_that_ends_with_0_is_not_the_end_of_the_training(tmp_path, monkeypatch, caplog):
    """As a forced command of sshd, or a login shell that starts nothing, does."""
    with caplog.at_level(logging.WARNING):
        them = Hosts(tmp_path, monkeypatch, "a b")
        them.tell("a", "nothing", "0")
        poll_for(lambda: "without starting the agent" in caplog.text, what="the failure is told")
        assert not them.codes
        them.tell("b", "end", "0 whole-job")
        them.tell("b", "answer")
        assert them.result() == 0


def test_one_host_that_refuses_the_job_does_not_end_it(tmp_path, monkeypatch):
    them = Hosts(tmp_path, monkeypatch, "a b")
    them.tell("a", "end", str(EXIT_USAGE))
    them.tell("a", "answer")
    assert them.endpoints("a") == "a"
    them.tell("b", "answer")
    assert them.endpoints("b")
    assert not them.codes
    them.tell("b", "end", "0 whole-job")
    assert them.result() == 0


def test_a_user_error_on_every_host_ends_the_job(tmp_path, monkeypatch):
    them = Hosts(tmp_path, monkeypatch, "a b")
    for host in "ab":
        them.tell(host, "end", str(EXIT_USAGE))
        them.tell(host, "answer")
    assert them.result() == EXIT_USAGE


def test_a_host_that_does_not_end_with_the_job_is_given_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(host_launcher, "END_TIMEOUT", 0.1)
    them = Hosts(tmp_path, monkeypatch, "b a")
    for host in "ab":
        them.tell(host, "answer")
    assert them.endpoints("b") == them.endpoints("a") == "b"  # and a never ends
    with caplog.at_level(logging.WARNING):
        them.tell("b", "end", "0 whole-job")
        assert them.result() == 0
    assert "a does not answer: an agent of this job may still run there" in caplog.text


def test_a_master_of_ssh_that_stays_does_not_hide_the_end(tmp_path, monkeypatch):
    """With `ControlPersist`, a process in the background keeps stderr open."""
    monkeypatch.setattr(host_launcher, "LAST_OUTPUT_TIMEOUT", 0.1)
    monkeypatch.setattr(host_launcher, "LOOK", 0.05)
    them = Hosts(tmp_path, monkeypatch, "a")
    them.tell("a", "hold")
    them.tell("a", "end", "0 whole-job")
    them.tell("a", "answer")
    try:
        assert them.result() == 0
    finally:
        (tmp_path / "a" / "hold").unlink()


def test_a_host_whose_ssh_cannot_be_started_is_tried_again_later(monkeypatch, caplog):
    monkeypatch.setattr(host_launcher, "command_for", lambda host: ["/none/ssh"])

    async def start() -> host_plan.HostState:
        job = host_launcher.HostJob(config=None, entry=None, workers=1, hosts=(), secret="")
        launcher = host_launcher._Launcher(job)
        launcher._states["a"] = host_plan.HostState("calling", 0.0)
        await launcher._run_host(HostSlots("a"))
        return launcher._states["a"]

    with caplog.at_level(logging.WARNING):
        state = asyncio.run(start())
    assert (state.status, state.failures) == ("failed", 1)
    assert "Cannot start /none/ssh ([Errno 2]" in caplog.text


# --- the program on a host ------------------------------------------------------------------------


def test_only_the_agent_that_runs_gets_signals(tmp_path, monkeypatch):
    """The file may have the pid of an agent that has ended, and that is another process now."""
    sent = []
    monkeypatch.setattr(os, "kill", lambda *words: sent.append(words))
    path = tmp_path / "lock"
    path.write_text("1")
    holder, follower = remote._Lock(path), remote._Lock(path)
    assert (holder.is_held, follower.is_held) == (True, False)
    follower.signal(15)
    assert sent == []
    holder.write("4321")
    follower.signal(15)
    assert sent == [(4321, 15)]
    holder.close()
    follower.close()


@pytest.mark.parametrize(("written", "exitcode"), [("4321", None), ("4321 1", 1), ("4321 0", 0)])
def test_follower_of_an_agent_learns_how_the_job_ended(tmp_path, written, exitcode):
    holder, follower = remote._Lock(tmp_path / "lock"), remote._Lock(tmp_path / "lock")
    holder.write(written)
    holder.close()
    assert follower.wait() == exitcode
    follower.close()


def test_the_last_output_is_not_lost():
    """It is in a pipe when the agent has ended: more than the pipe to the reader holds."""
    program = (
        "import sys\n"
        "from torchelastic.hosts import remote\n"
        "with remote._outliving_readers():\n"
        "    sys.stdout.write('x' * 1_000_000)\n"
        "    sys.stdout.flush()\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=30)
    assert len(ran.stdout) == 1_000_000


#: An agent that ends when it gets a signal, with the code and the world of the arguments.
AGENT = """
import json, os, signal, sys, threading
from types import SimpleNamespace
from torchelastic.config import LaunchConfig, Entry
from torchelastic.hosts import remote
code, phase = int(sys.argv[2]), sys.argv[3]
class Agent:
    pid = 1
    def __init__(self, *given):
        self.told = threading.Event()
    def signal(self, signum):
        print("agent got", signum, flush=True)
        self.told.set()
    def wait(self):
        while not self.told.wait(0.01):
            pass
        world = SimpleNamespace(phase=phase) if phase else None
        return SimpleNamespace(exitcode=code, world=world, place=None, told=lambda name: "why")
remote.AgentProcess = Agent
lock = remote._Lock(remote.Path(sys.argv[1]))
sys.exit(remote._run(LaunchConfig(1, 1, 1), Entry("script", "t.py"), "secret", lock))
"""


@pytest.mark.parametrize(
    ("code", "phase", "ends_job"),
    [(143, "running", False), (1, "closed", True), (64, "", False), (0, "closed", True)],
)
def test_sigterm_makes_the_agent_leave_and_its_end_is_told(tmp_path, code, phase, ends_job):
    """A machine that shuts down signals this program; without it, the agent would be killed."""
    lock = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(lock), str(code), phase],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == remote.STARTED + "\n"
        ran.terminate()
        out, err = ran.communicate(timeout=30)
    assert ran.returncode == code
    assert out.startswith("agent got 15\n")
    assert (remote.ENDED in out) == ends_job
    assert (lock.read_text() == f"1 {code}") == ends_job
    assert ("why" in err) == (code in (1, 64))
