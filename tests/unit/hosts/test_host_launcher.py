"""Calling hosts, founding the job on one of them, and what their ends mean.

The program on each host is a stand-in that says what `remote` would say; `command_for` is replaced.
"""

import asyncio
import json
import logging
import sys
import threading
from pathlib import Path

from tests.support import poll_for
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import EXIT_USAGE
from torchelastic.hosts import host_launcher, host_plan, remote
from torchelastic.hosts.host_list import HostSlots, parse_hosts

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
