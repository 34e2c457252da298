"""The gate: two threads at one boundary, and many gates with one leader, in every order."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.unit.worker.entering import enter
from torchelastic.errors import ChannelLost, JobClosed
from torchelastic.training.gate import Gate, GateDecision
from torchelastic.training.inbox import Inbox
from torchelastic.worker.orders import Ask, Closed, Entered, Leave, Order, Over, Through


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
def test_gate_decision_follows_from_the_answers(calls, verdicts):
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


# --- the inbox ------------------------------------------------------------------------------------


@pytest.fixture
def inbox():
    return Inbox()


def in_world(inbox, generation, step):
    """Enter the world, and a step of it."""
    inbox.take(enter(generation))
    assert inbox.next(None) == enter(generation)
    gate = inbox.gate(generation)
    assert gate.enter(step)
    return gate


def test_a_question_is_answered_at_once_also_before_the_world_is_entered(inbox):
    gate = in_world(inbox, 0, 5)
    inbox.take(enter(1))
    for _ in range(2):
        assert inbox.take(Ask(0)) == Entered(0, 5)
        assert not gate.enter(6)
    assert inbox.take(Ask(1)) == Entered(1, -1)


def test_the_size_of_the_next_world_is_known_until_it_is_entered_or_void(inbox):
    in_world(inbox, 0, 5)
    assert inbox.next_size == 0
    inbox.take(enter(1, after=5))
    assert inbox.next_size == 1
    inbox.take(Over(0, "lost"))
    assert inbox.next_size == 0


@pytest.mark.parametrize("order", [Ask(6), Ask(8), Through(6, 0), Over(6)])
def test_inbox_ignores_orders_of_other_generations(inbox, order):
    gate = in_world(inbox, 7, 3)
    assert inbox.take(order) is None
    assert gate.enter(4)
    assert inbox.next(None) is None


class Next(NamedTuple):
    """The training thread, whose world broke or did not, is to do this."""

    order: Order | None
    broken: int | None = None


#: Orders, worlds that the training thread has left at a boundary, and what it does next.
STORIES = {
    "to the next world by agreement":
        [Ask(0), enter(1, after=6), 0, Next(enter(1, after=6))],
    "stop and wait for a world":
        [Ask(0), Through(0, 5), 0, Next(None), enter(1), Next(enter(1))],
    "a failure voids what was agreed":
        [enter(1, after=6), Over(1, "lost"), Next(Over(1, "lost"), 0), Next(None, 0),
         enter(2), Next(enter(2), 0)],
    "a world that was to follow one that is over is not entered":
        [enter(1, after=6), Over(0), Next(Over(0), 0), Next(None, 0)],
    "a worker whose world broke waits until it is over":
        [enter(1, after=6), Next(None, 0), Over(1), enter(2), Next(Over(1), 0), Next(enter(2), 0)],
    "every over is answered once":
        [Over(0), Next(Over(0), 0), Over(0), Next(None, 0), Over(1), Next(Over(1))],
    "a world said twice or late is not entered again":
        [enter(0), Next(None), 0, enter(3), Next(enter(3)), enter(2), Next(None)],
    "leaving comes after everything else":
        [Leave(15), Over(0), enter(1), Next(Over(0), 0), Next(enter(1), 0), 1, Next(Leave(15))],
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_inbox_gives_the_next_order_after_step_5(inbox, story):
    in_world(inbox, 0, 5)
    for event in story:
        match event:
            case Next(order, broken):
                assert inbox.next(broken) == order
            case int(generation):
                inbox.left(generation)
            case order:
                inbox.take(order)


@pytest.mark.parametrize(
    ("orders", "verdicts"),
    [
        ([Ask(0), enter(1, after=6)], {6: GateDecision.GO, 7: GateDecision.STOP}),
        ([Ask(0), Through(0, 5)], {6: GateDecision.STOP}),
        ([enter(1, after=6), Over(1)], {6: GateDecision.OVER}),
    ],
)
def test_inbox_gives_the_last_step_after_step_5(inbox, orders, verdicts):
    gate = in_world(inbox, 0, 5)
    for order in orders:
        inbox.take(order)
    assert {step: gate.decision(step) for step in verdicts} == verdicts
    assert inbox.is_over(0) is (GateDecision.OVER in verdicts.values())


def test_a_newcomer_enters_at_once_whatever_the_others_have_agreed_on(inbox):
    inbox.take(enter(1, after=6))
    assert inbox.next(None) == enter(1, after=6)
    assert inbox.gate(1).enter(7)


def test_over_before_the_world_was_entered(inbox):
    inbox.take(enter(3))
    world = inbox.next(None)
    inbox.take(Over(3))
    assert inbox.gate(world.generation).decision(0) is GateDecision.OVER
    assert inbox.is_over(3)


@pytest.mark.parametrize(("through", "aborts"), [(None, True), (4, True), (5, False), (6, False)])
def test_at_the_end_of_the_training_the_last_step_is_run_to_its_end(inbox, through, aborts):
    gate = in_world(inbox, 0, 5)
    inbox.take(Over(0, "done", finished=True, through=through))
    assert inbox.is_over(0) is aborts
    assert gate.decision((through or 5) + 1) is (GateDecision.OVER if aborts else GateDecision.STOP)
    assert inbox.next(None).finished


def test_the_job_is_closed(inbox):
    gate = in_world(inbox, 0, 5)
    inbox.take(Closed("The budget is spent."))
    inbox.close(ChannelLost("The agent is gone."))
    assert isinstance(inbox.closed, JobClosed)
    assert gate.decision(6) is GateDecision.OVER
    assert inbox.is_over(0)
    assert inbox.reason == "The budget is spent."
