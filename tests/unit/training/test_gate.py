"""The gate: two threads at one boundary, and many gates with one leader, in every order."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from torchelastic.training.gate import Gate, GateDecision


@pytest.mark.parametrize(
    ("calls", "verdicts"),
    [
        ("enter 1", {1: GateDecision.GO}),
        ("ask", {0: GateDecision.WAIT}),
        ("ask, run_through -1", {0: GateDecision.STOP}),
        ("enter 5, ask", {5: GateDecision.GO, 6: GateDecision.WAIT}),
        ("enter 5, ask, run_through 6", {6: GateDecision.GO, 7: GateDecision.STOP}),
        ("ask, run_through 3, run_through 7", {4: GateDecision.STOP}),  # the first word stands
        ("enter 5, ask, run_through 9, end", {6: GateDecision.OVER}),  # whatever was agreed
    ],
)
def test_what_follows_from_what_was_said(calls, verdicts):
    gate = Gate(0)
    for call in calls.split(", "):
        name, *step = call.split()
        getattr(gate, name)(*map(int, step))
    assert {step: gate.decision(step) for step in verdicts} == verdicts


def test_the_answer_stays_the_same():
    """What is announced later waits at the gate: it must not be counted as entered."""
    gate = Gate(0)
    assert gate.enter(5)
    assert gate.ask() == 5
    assert not gate.enter(6)
    assert gate.ask() == 5
    gate.run_through(8)
    assert gate.ask() == 5


class Recorded(Gate):
    """Writes down in which order the two shared variables are used."""

    __slots__ = ("used",)

    def __init__(self):
        self.used = []
        super().__init__(0)
        self.used.clear()

    def __getattribute__(self, name):
        if name in ("entered", "asked"):
            object.__getattribute__(self, "used").append(f"read {name}")
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        if name in ("entered", "asked"):
            self.used.append(f"write {name}")
        super().__setattr__(name, value)


def test_the_order_that_the_proof_needs():
    gate = Recorded()
    gate.enter(3)
    assert gate.used == ["write entered", "read asked"]
    for asking in (Gate.ask, lambda gate: gate.finish(0)):
        gate = Recorded()
        asking(gate)
        assert gate.used.index("write asked") < gate.used.index("read entered")


def test_without_one_order_of_all_threads_every_step_looks(monkeypatch):
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    gate = Gate(0)
    assert not gate.enter(0)
    assert gate.decision(0) is GateDecision.GO


# --- every order of events, with a leader --------------------------------------------------------
#
# Workers take steps, each of which ends when every worker of the world is in it. At any moment the
# leader asks; a new leader asks again; the last step is told to one worker after the other; a
# worker dies; the data of one ends. Messages to a worker arrive in order, at any time. What a
# worker does at its gate is done by the real one, in the steps that can be told apart: announce,
# look, look under the lock; and to be asked is two steps, with the lock held between them.

STEPS = 2
FIELDS = ("entered", "asked", "answer", "last", "over")


def thaw(state):
    gate = Gate(1)
    for name, value in zip(FIELDS, state, strict=True):
        setattr(gate, name, value)
    return gate


def freeze(gate):
    return tuple(getattr(gate, name) for name in FIELDS)


class Worker(NamedTuple):
    at: str = "boundary"  # announced, looking, inside, stopped, over, finished, dead
    step: int = 0
    #: The last step it really was in.
    inside: int = -1
    gate: tuple = freeze(Gate(1))
    orders: tuple = ()
    #: The control thread has begun to be asked, and holds the lock.
    locked: bool = False


class Leader(NamedTuple):
    #: `watching`, `asking`, `shipper`, `ending`.
    phase: str = "watching"
    answers: tuple = ()
    last: int | None = None
    told: int = 0


class System(NamedTuple):
    workers: tuple
    leader: Leader = Leader()
    #: What may still happen.
    changes_of_leader: int = 0
    deaths: int = 0
    #: The worker whose data ends, and the step it does not take.
    data_ends: tuple | None = None
    #: Every last step that any leader has found.
    found: frozenset = frozenset()
    #: Set when the leader knows of a death or of the end of the data.
    why_over: str = ""

    def with_worker(self, index, **changes):
        worker = self.workers[index]._replace(**changes)
        return self._replace(workers=(*self.workers[:index], worker, *self.workers[index + 1 :]))


def successors(system):
    for index, worker in enumerate(system.workers):
        if worker.at == "dead":
            continue
        yield from training_thread(system, index, worker)
        yield from control_thread(system, index, worker)
        if system.deaths:
            dead = system.with_worker(index, at="dead", orders=())
            yield dead._replace(deaths=system.deaths - 1)
    yield from leader(system)


def training_thread(system, index, worker):
    gate = thaw(worker.gate)
    if worker.at == "boundary":
        if worker.step < STEPS or gate.asked:
            gate.entered = worker.step
            yield system.with_worker(index, at="announced", gate=freeze(gate))
    elif worker.at == "announced":
        if gate.asked:
            yield system.with_worker(index, at="looking")
        else:
            yield system.with_worker(index, at="inside", inside=worker.step)
    elif worker.at == "looking" and not worker.locked:
        after = {GateDecision.GO: "inside", GateDecision.STOP: "stopped", GateDecision.OVER: "over"}
        at = after.get(gate.decision(worker.step))
        if at is not None:
            inside = worker.step if at == "inside" else worker.inside
            yield system.with_worker(index, at=at, inside=inside)
    elif worker.at == "inside":
        if system.data_ends == (index, worker.step):
            yield system.with_worker(index, at="finished")
        elif gate.over:  # its waits are freed; it rolls back
            yield system.with_worker(index, at="over")
        if all_take_part(system, worker.step):
            yield system.with_worker(index, at="boundary", step=worker.step + 1)


def all_take_part(system, step):
    """Whether everybody is in this step, or has been; who finds no data takes no part."""
    return all(
        other.inside >= step and system.data_ends != (index, step)
        for index, other in enumerate(system.workers)
    )


def control_thread(system, index, worker):
    if not worker.orders:
        return
    kind, *values = worker.orders[0]
    gate = thaw(worker.gate)
    done = {"orders": worker.orders[1:]}
    if kind == "stale":
        yield system.with_worker(index, **done)  # of another generation: no gate hears it
    elif kind == "ask" and not worker.locked and gate.answer is None:
        gate.asked = True
        yield system.with_worker(index, locked=True, gate=freeze(gate))
    elif kind == "ask":
        answer = gate.ask()
        after = system.with_worker(index, locked=False, gate=freeze(gate), **done)
        answers = dict(system.leader.answers) | {index: answer}
        if system.leader.phase == "asking" and values == [system.changes_of_leader]:
            leader = system.leader._replace(answers=tuple(sorted(answers.items())))
            after = after._replace(leader=leader)
        yield after
    elif kind == "through":
        gate.run_through(*values)
        yield system.with_worker(index, gate=freeze(gate), **done)
    elif kind == "finish":
        gate.finish(*values)
        yield system.with_worker(index, gate=freeze(gate), **done)
    elif kind == "over":
        gate.end()
        yield system.with_worker(index, gate=freeze(gate), **done)


def send(system, order, only=None):
    for index, worker in enumerate(system.workers):
        if worker.at != "dead" and only in (None, index):
            system = system.with_worker(index, orders=(*worker.orders, order))
    return system


def leader(system):
    state = system.leader
    if not system.why_over:
        yield from leader_notices(system)
    if state.phase == "watching":
        asked = send(system, ("ask", system.changes_of_leader))
        yield asked._replace(leader=Leader("asking"))
    elif state.phase == "asking" and len(state.answers) == len(system.workers):
        last = max(answer for _, answer in state.answers)
        found = system.found | {last}
        yield system._replace(leader=Leader("telling", last=last), found=found)
    elif state.phase == "telling" and state.told < len(system.workers):
        told = send(system, ("through", state.last), only=state.told)
        yield told._replace(leader=state._replace(told=state.told + 1))
    if state.phase in ("asking", "telling") and system.changes_of_leader:
        # The next leader knows nothing of what was answered and told.
        changed = system._replace(changes_of_leader=system.changes_of_leader - 1)
        yield changed._replace(leader=Leader("watching"))


def leader_notices(system):
    """A failure, or the end of the data, voids what was asked."""
    if any(worker.at == "dead" for worker in system.workers):
        over = send(system, ("over",))
        yield over._replace(leader=Leader("ending"), why_over="death")
    elif any(worker.at == "finished" for worker in system.workers):
        over = send(system, ("finish", system.data_ends[1] - 1))
        yield over._replace(leader=Leader("ending"), why_over="end of data")


def explore(first):
    """Every state that can be reached; checks each, and those in which nothing can happen."""
    seen, waiting = {first}, [first]
    while waiting:
        system = waiting.pop()
        check(system)
        stuck = True
        for after in successors(system):
            stuck = False
            if after not in seen:
                seen.add(after)
                waiting.append(after)
        if stuck:
            check_end(system)
    return len(seen)


def check(system):
    assert len(system.found) <= 1, "all leaders find the same step"
    for last in system.found:
        assert all(worker.inside <= last for worker in system.workers), "nobody goes beyond it"


def check_end(system):
    living = [worker for worker in system.workers if worker.at != "dead"]
    if system.why_over == "death":
        assert all(worker.at in ("over", "stopped", "finished") for worker in living)
    elif system.why_over:
        ended = system.data_ends[1]
        assert all(worker.at in ("over", "stopped", "finished") for worker in living)
        assert all(worker.step == ended for worker in living), "nobody returns with less"
    else:
        (last,) = system.found
        assert all(worker.at == "stopped" for worker in living), "all reach it"
        assert all(worker.step == last + 1 for worker in living)


def workers(count):
    stale = (("stale",),)
    return (Worker(orders=stale), *(Worker() for _ in range(count - 1)))


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(System(workers(2), changes_of_leader=1, deaths=1), marks=pytest.mark.slow),
        System(workers(2), changes_of_leader=1, data_ends=(1, 1)),
        System(workers(2), deaths=1, data_ends=(0, 1)),
        System(workers(2), data_ends=(0, 0)),
        pytest.param(System(workers(3)), marks=pytest.mark.slow),
        pytest.param(System(workers(3), data_ends=(1, 1)), marks=pytest.mark.slow),
    ],
    ids=["leader and death", "leader and end", "death and end", "no data", "three", "three, end"],
)
def test_in_every_order_of_events(system):
    assert explore(system) > 100
