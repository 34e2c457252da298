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
from tests.unit.cli.tables import not_refused
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


def test_lists_of_hosts_are_read_or_refused():
    assert parse_lines("# rack 7\na:8  # fast\n\nb\n") == (HostSlots("a", 8), HostSlots("b"))
    assert len(parse_hosts(["localhost:1", "127.0.0.1:1"])) == 2
    wrong = ("host:0", "host:x", "-oProxyCommand=x", "-oProxyCommand=x@host", "a b", "h:8:8", "@x")
    # Other machines would look for the job on themselves, and found a second one.
    local = ("localhost:2", "127.0.0.1", "[::1]:2")
    refused = [
        *(([text], "is not a host") for text in wrong),
        (["a:1", "b", "a:2"], "listed twice"),
        *(([text, "host2:2"], "is a different machine for each host") for text in local),
    ]
    assert not_refused(parse_hosts, refused) == []


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


LATE, IN_TIME = (HostState("calling", NOW - ANSWER_TIMEOUT + late) for late in (0, 1))
GONE, RESTS = (failed(HostState("running", NOW - 99), NOW - FIRST_PAUSE + rest) for rest in (0, 1))
PAIR, ALL_RUN = (A, B), {"a": "running", "b": "running", "c": "running"}
#: The hosts, what they do, where the job runs, whether it may run elsewhere, and what is done.
PLANS = {
    "all are called": (HOSTS, {}, [], False, [Connect(A), Connect(B), Connect(C)]),
    "the first of the list has time to answer": (
        HOSTS, {"a": IN_TIME, "b": "ready", "c": "calling"}, [], False, []
    ),
    "the first that answers in time founds the job": (
        HOSTS, {"a": LATE, "b": "ready", "c": "calling"}, [], False, [StartAgent(B, ("b",))]
    ),
    "there is one founder however slow it is": (
        HOSTS, {"a": "ready", "b": HostState("starting", NOW - 1000), "c": "ready"}, [], False, []
    ),
    "another founds it when the founder is gone": (
        HOSTS, {"a": "ready", "b": RESTS, "c": "calling"}, [], False, [StartAgent(A, ("a",))]
    ),
    "the others follow once it runs": (
        HOSTS, {"a": "running", "b": "ready", "c": "ready"}, ["ada@a"], False,
        [StartAgent(B, ("a",)), StartAgent(C, ("a",))],
    ),
    "a job that may run is not founded while a host may say so": (
        PAIR, {"a": "ready", "b": IN_TIME}, [], True, []
    ),
    "it is founded when all had time to say so": (
        PAIR, {"a": "ready", "b": LATE}, [], True, [StartAgent(A, ("a",))]
    ),
    "a new job is founded at once": (
        PAIR, {"a": "ready", "b": IN_TIME}, [], False, [StartAgent(A, ("a",))]
    ),
    "a new host looks for the job where it runs": (
        HOSTS, ALL_RUN | {"a": "ready"}, ["b", "c"], False, [StartAgent(A, ("b", "c"))]
    ),
    "a failed host waits for its pause": (HOSTS, ALL_RUN | {"a": RESTS}, ["b", "c"], False, []),
    "and is called again": (HOSTS, ALL_RUN | {"a": GONE}, ["b", "c"], False, [Connect(A)]),
    "after all failed they meet where the last one ran": (
        PAIR, {"a": "ready", "b": "ready"}, ["b"], False,
        [StartAgent(A, ("b",)), StartAgent(B, ("b",))],
    ),
    "endpoints of hosts no longer listed are forgotten": (
        (C,), {"c": "ready"}, ["ada@a", "b"], False, [StartAgent(C, ("c",))]
    ),
    "a host that is not listed any more leaves": (
        (B,), {"a": "running", "b": "running"}, ["ada@a", "b"], False, [LeaveHost("ada@a")]
    ),
    "it leaves once": ((B,), {"a": "leaving", "b": "running"}, ["b"], False, []),
    "a host that comes back has to leave first": (
        HOSTS, ALL_RUN | {"a": "leaving"}, ["b", "c"], False, []
    ),
    "and is called when it has left": (
        HOSTS, {"b": "running", "c": "running"}, ["b", "c"], False, [Connect(A)]
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("hosts", "status", "ran", "may_run", "actions"), PLANS.values(), ids=PLANS
)
def test_plan_of_hosts(hosts, status, ran, may_run, actions):
    assert plan(hosts, states(**status), ran, NOW, may_run=may_run) == actions


def test_plan_names_few_of_many_endpoints_and_every_host_not_listed_leaves():
    many = parse_hosts([f"h{number}" for number in range(9)])
    told = plan(many, {"h8": HostState("ready", NOW)}, [h.target for h in many[:8]], NOW)[-1]
    assert told == StartAgent(many[8], ("h0", "h1", "h2"))
    for status in ("calling", "ready", "starting", "running"):
        assert plan((), states(a=status), ["ada@a"], NOW) == [LeaveHost("ada@a")]


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
