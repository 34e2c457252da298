"""The cast of the tests of commands: an agent that is only its entry and its event log."""

from __future__ import annotations

import os
import time

from tests.support import FakeClock
from torchelastic.events import job_registry
from torchelastic.events import types as events
from torchelastic.events.failure import Failure
from torchelastic.events.log import EventLog

CAUSE = Failure(
    generation=0,
    node="node-b",
    rank=9,
    local_rank=1,
    pid=4242,
    exitcode=1,
    message="RuntimeError: boom " + "x" * 200,
    traceback="Traceback (most recent call last):\nRuntimeError: boom",
    step=7,
)
HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\nroot:x:0\u202e\x9b31m"


def harmless(text: str) -> bool:
    """Return True if nothing of `HOSTILE` controls the terminal or begins a line."""
    controls = set(text) & {"\x1b", "\x07", "\r", "\u202e", "\x9b"}
    return not controls and not any(line.startswith("root:") for line in text.splitlines())


class Agent:
    """An agent's entry and event log, without the agent."""

    def __init__(self, job: str, name: str = "node-a", *, pid: int | None = None) -> None:
        node = f"id-{name}"
        path = job_registry.directory_for(job, node) / "events.jsonl"
        self.registration = job_registry.register(
            job,
            node,
            pid=pid or os.getpid(),
            name=name,
            endpoint="node-a:29400",
            command=["train.py", "--lr", "0.1"],
            events=path,
        )
        self.clock = FakeClock(time.monotonic())
        self.log = EventLog(path, job=job, node=node, clock=self.clock)
        self.tell(events.AgentStarted(os.getpid(), "node-a:29400", ["train.py"], 1, 4, 2))
        self.tell(events.Joined(name, "node-a:29400", True))

    def tell(self, event: events.Event, generation: int | None = None) -> Agent:
        self.clock.advance(1)
        self.log.emit(event, generation=generation)
        return self

    def world(self, generation: int, *names: str, reason: str = "the job starts") -> Agent:
        formed = events.WorldFormed(names, 2 * len(names), "s", reason, generation)
        return self.tell(formed, generation)

    def end(self, exitcode: int, reason: str, cause: Failure | None = None) -> None:
        told = cause.to_json() if cause else None
        self.tell(events.JobEnded(exitcode, reason, told))
        self.log.close()
        self.registration.close(exitcode)


def trained(job: str) -> Agent:
    """Ten steps, a killed worker and its recovery, one second per event."""
    agent = Agent(job).world(0, "node-a").tell(events.Training(0, 0, 0), 0)
    for step in range(1, 11):
        agent.tell(events.Progress([0, 1], [step] * 2, [agent.clock.now() + 1] * 2), 0)
    agent.tell(events.WorkerFailed(CAUSE.to_json()), 0)
    agent.tell(events.GenerationOver("failure", CAUSE.sentence()), 0)
    agent.world(1, "node-a").tell(events.Training(0, 10, 0, 0.25, 0.5), 1)
    for step in range(11, 14):
        agent.tell(events.Progress([0, 1], [step] * 2, [agent.clock.now() + 1] * 2), 1)
    return agent


def achieved(job: str) -> Agent:
    """A script that reports its loss, counts its samples and stores checkpoints."""
    agent = Agent(job).world(0, "node-a")
    metrics, now = {"loss[red]": 2.5}, agent.clock.now()
    progress = events.Progress([0], [5], [now + 1], metrics=metrics, samples=6400)
    agent.tell(progress, 0)
    return agent.tell(events.CheckpointStored(0, 4, at=now + 2, seconds=0.5, size=100), 0)
