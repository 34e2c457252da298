"""A job whose rounds are decided in virtual time, without a store."""

from __future__ import annotations

from dataclasses import replace

from torchelastic.events.failure import Failure
from torchelastic.rendezvous import round_state
from torchelastic.rendezvous.decide import decide
from torchelastic.rendezvous.round_state import RoundRules, RoundState
from torchelastic.rendezvous.world import Member, World


class Job:
    """A leader without a store: members come and go, `now` moves, worlds are taken as published."""

    def __init__(self, nnodes: str = "1:4", **rules) -> None:
        low, high = map(int, nnodes.split(":"))
        self.rules = RoundRules(min_nodes=low, max_nodes=high, **rules)
        self.state = RoundState()
        self.now = 0.0
        self.worlds: list[World] = []
        self.kinds: list[str | None] = []
        self.wake_at: float | None = None
        self.claims: tuple[str, ...] = ()
        self.records: dict[str, tuple[Member, int]] = {}
        self.revision = 0

    def come(self, *names: str, ready: bool = True, **fields) -> None:
        for name in names:
            self.revision += 1
            member = Member(
                node=name,
                name=name,
                addr=name,
                **{"nproc": 2, "store": f"{name}:{self.revision}", **fields},
                ready=ready,
            )
            self.records[name] = (member, self.revision)
            self._tell(name)

    def say(self, name: str, **changes) -> None:
        member, created = self.records[name]
        self.records[name] = (replace(member, **changes), created)
        self._tell(name)

    def _tell(self, name: str) -> None:
        member, created = self.records[name]
        self.state = round_state.seen(self.state, member, created, self.now)
        self.settle()

    def die(self, *names: str) -> None:
        for name in names:
            del self.records[name]
            self.state = round_state.lost(self.state, name)
        self.settle()

    def settle(self) -> None:
        for _ in range(10):
            decision = decide(self.rules, self.state, self.now)
            self.wake_at, self.claims = decision.wake_at, decision.claims
            if decision.world is None:
                return
            self.worlds.append(decision.world)
            self.kinds.append(decision.kind)
            self.state = round_state.published(self.state, decision.world, self.now)
        raise AssertionError(f"no rest: {self.worlds[-3:]}")

    def wait(self, seconds: float) -> None:
        """Let time pass, waking whenever the round asked for it."""
        end = self.now + seconds
        while self.wake_at is not None and self.wake_at <= end:
            self.now = max(self.now, self.wake_at)
            self.settle()
        self.now = end

    def all_gone(self) -> None:
        """Every member that stays stops its workers and offers a fresh store."""
        for name, (member, _) in list(self.records.items()):
            if self.world.phase == "over" and not member.leaving:
                self.revision += 1
                self.say(name, gone=self.world.generation, store=f"{name}:{self.revision}")

    @property
    def world(self) -> World:
        return self.worlds[-1]

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.world.nodes]


def failure(node: str, generation: int = 0, message: str = "ValueError: no", **fields) -> Failure:
    made = {
        "rank": 0,
        "local_rank": 0,
        "pid": 1,
        "exitcode": 1,
        "traceback": f'  File "train.py", line 3\n{message}',
        **fields,
    }
    return Failure(generation=generation, node=node, message=message, **made)


def running(nnodes: str = "1:4", nodes: str = "ab", **rules) -> Job:
    """A job whose first world runs on `nodes`."""
    job = Job(nnodes, **rules)
    job.come(*nodes)
    job.wait(job.rules.settle)
    assert (job.world.phase, job.world.generation, job.names) == ("running", 0, list(nodes))
    return job
