"""Timers under a real agent: whatever a worker hangs in, it is ended, and the scope is named."""

from __future__ import annotations

from pathlib import Path

from tests.light import with_light_torch
from tests.process.jobs import job

SCRIPT = Path(__file__).with_name("timed.py")
#: The worlds of so many generations cannot be built.
FAILING = 5
#: `torchelastic` that takes a generation for one that failed right after its start, however long a
#: busy machine takes to start it.
PATIENT = """
import sys
from torchelastic import cli
from torchelastic.rendezvous import restart_policy
restart_policy.START_FAILURE_TIME = 100.0
sys.exit(cli.main())
"""


def line_of(text: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


def test_worker_hung_in_anything_is_ended_with_its_stack(tmp_path, monkeypatch):
    """In Python, in another thread, by torch's timers, in C with the GIL: a generation each."""
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("PYTHONPATH", with_light_torch()["PYTHONPATH"])
    place = f"{SCRIPT}#{line_of('with expires(after=0.3):')}"
    with job(tmp_path, "--standalone --no-zygote --max-restarts=3") as it:
        node = it.start(script=[str(SCRIPT), "script"])
        assert node.wait(100) == 1, node.stderr
        killed = {event["reason"]: event["stack"] for event in node.events("worker-killed")}
        words = [f"timer '{scope}' expired after 0.3 s" for scope in ("outer", "data", place)]
        for word, function in zip(
            words, ("in_python", "wait_for_data", "holding_the_gil"), strict=True
        ):
            assert f"in {function}" in killed[word]
        generations = [event["generation"] for event in node.events("worker-killed")]
        assert generations == [0, 1, 2, 3]
        failures = [event["failure"] for event in node.events("worker-failed")]
        assert {item["exitcode"] for item in failures} == {-9}
        assert [item["message"] for item in failures] == list(killed)
        assert failures[2]["message"].startswith("timer 'torch's' expired after ")
        report = node.stderr.partition("Root Cause")[2]
        assert f"error     : {words[-1]}" in report
        assert "in holding_the_gil" in report


def test_a_resident_worker_is_replaced_and_the_training_goes_on(tmp_path, monkeypatch):
    """It hangs in a step. Before, worlds could not be built, and others were tried after pauses."""
    faults = [f"raise@rank=1,place=group.build,generation={number}" for number in range(FAILING)]
    monkeypatch.setenv("TORCHELASTIC_FAULTS", ";".join(faults))
    with job(tmp_path, "--standalone --nproc-per-node=2") as it:
        it.program = ["-c", PATIENT]
        node = it.start(script=[str(SCRIPT), "train", str(FAILING)])
        assert node.wait(100) == 0, node.stderr
        stacks = {event["reason"]: event["stack"] for event in node.events("worker-killed")}
        assert "timed.py" in stacks["timer 'slow step' expired after 0.3 s"]
        [failure] = [
            event["failure"]
            for event in node.events("worker-failed")
            if "'slow step'" in event["failure"]["message"]
        ]
        assert failure["step"] == 3, "it has not gone on when it was looked at"
        assert "trained 6 steps" in node.stdout
        reasons = [event["reason"] for event in node.events("generation-over")]
        paused = [reason for reason in reasons if "failed right after start" in reason]
        # The first step that the leader hears of is progress, and there is no pause after one.
        assert len(paused) >= FAILING - 3, node.stderr
        assert "Injected fault" in paused[0]
        assert paused[0].endswith("the next one starts in 0.25 s")
