"""The in-process workers of one node, by table: what is told, started, reported and when."""

import math
from dataclasses import replace

import pytest

from tests.unit.agent.cast import place
from torchelastic.agent.lifecycle import in_process
from torchelastic.agent.lifecycle.in_process import InProcessState
from torchelastic.agent.lifecycle.last_copy import LiveCopy, is_usable, is_waited_for, may_be_killed
from torchelastic.agent.lifecycle.node_state import (
    Command,
    Kill,
    LeaseLost,
    LeaveOverdue,
    LeaveRequested,
    Phase,
    PlaceAllotted,
    Rejoin,
    ReportMember,
    Spawn,
    Stop,
    StoreLost,
    Tell,
    WorkerFailed,
    WorkerMessage,
    WorkersGone,
    WorkerSucceeded,
    WorldSeen,
)
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.restart_policy import is_from_outside
from torchelastic.rendezvous.state_check import Rewind
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders
from torchelastic.worker.orders import Enlisted, Entered, Finished, Stopped, Unfit


def world(generation: int = 0, phase: str = "running", me=(0, 1), **fields) -> World:
    """This node `a` with these workers, beside a node `b` with two."""
    others = place("b", bool(me), first_rank=len(me))
    nodes = [place("a", nproc=len(me), local_ranks=me), others] if me else [others]
    made = World(generation=generation, phase=phase, store="b:1", in_process=True)
    return replace(made.with_nodes(nodes), **fields)


def see(*args, **fields) -> WorldSeen:
    return WorldSeen(world(*args, **fields))


FINISHED = see(phase="over", ending="finished", after=11)
FAILED = see(phase="over", ending="failure")


class Node:
    def __init__(self, state: InProcessState) -> None:
        self.state = state

    def feed(self, event) -> list[Command]:
        """An event, or a function that makes one of this node."""
        event = event(self) if callable(event) else event
        self.state, commands = in_process.handle(self.state, event)
        return commands

    def statuses(self) -> str:
        return " ".join(worker.status.value for worker in self.state.workers.values())


def dies(local_rank: int, generation: int | None = None, **fields):
    """In the generation it is in, unless another one is given."""
    facts = {"pid": 9, "exitcode": -9, "message": "killed", **fields}

    def event(node: Node) -> WorkerFailed:
        now = node.state.workers[local_rank].generation if generation is None else generation
        return WorkerFailed(
            Failure(generation=now, node="a", rank=local_rank, local_rank=local_rank, **facts)
        )

    return event


def training(generation: int = 0) -> Node:
    """A node whose two workers are in a world with those of another one."""
    state, commands = in_process.take_over(running(generation))
    assert spawned(commands) == []
    node = Node(state)
    node.feed(see(generation))
    return node


def running(generation: int = 0) -> ScriptState:
    group = ScriptState(node="a", nproc=2, phase=Phase.RUNNING)
    return replace(group, generation=generation, world=world(generation))


def told(commands: list[Command]) -> str:
    """Who is told what, in short."""
    return ", ".join(
        f"{command.local_rank} {type(command.order).__name__}"
        for command in commands
        if isinstance(command, Tell)
    )


def reported(commands: list[Command]) -> dict[str, object]:
    merged: dict[str, object] = {}
    for command in commands:
        if isinstance(command, ReportMember):
            merged.update(command.changes)
    return merged


def spawned(commands: list[Command]) -> list[int]:
    return [command.local_rank for command in commands if isinstance(command, Spawn)]


def then(event, **expected):
    """A step, and what is expected of it; `reported` as None is not reported."""
    return event, expected


STORIES = {
    "a dead worker is reported and replaced": [
        then(dies(1), spawned=[1], reported={"standing": (0,)}, statuses="training starting")
    ],
    "gone is said when every worker has stopped or died": [
        then(dies(1)),
        then(
            see(phase="over", reason="why", ending="failure"),
            told="0 Over",
            reported={"gone": None},
        ),
        then(WorkerMessage(0, Stopped(0, 7)), reported={"gone": 0}, statuses="standing starting"),
    ],
    "gone is said at once where nobody trains": [
        then(dies(0)),
        then(dies(1)),
        then(FAILED, reported={"gone": 0}),
    ],
    "a death while stopping counts as stopped": [
        then(FAILED),
        then(WorkerMessage(0, Stopped(0, 7)), reported={"gone": None}),
        then(dies(1), reported={"gone": 0}),
    ],
    "a stop of an older generation means nothing": [
        then(FAILED),
        then(WorkerMessage(0, Stopped(-1, 7)), commands=[]),
    ],
    "the largest step is the node's answer": [
        then(see(phase="pausing", ending="resize"), told="0 Ask, 1 Ask"),
        then(WorkerMessage(0, Entered(0, 8)), commands=[]),
        then(WorkerMessage(1, Entered(0, 7)), reported={"paused": 0, "entered": 8}),
    ],
    "a world that pauses before it was seen running is entered, too": [
        then(FAILED),
        then(WorkerMessage(0, Stopped(0, 7))),
        then(WorkerMessage(1, Stopped(0, 7)), statuses="standing standing"),
        then(
            see(1, phase="pausing", ending="resize"),
            told="0 Enter, 1 Enter, 0 Ask, 1 Ask",
            reported={"paused": None},
        ),
        then(WorkerMessage(0, Entered(1, -1))),
        then(WorkerMessage(1, Entered(1, -1)), reported={"paused": 1, "entered": -1}),
    ],
    "a death does not leave the question unanswered": [
        then(see(phase="pausing", ending="resize")),
        then(WorkerMessage(0, Entered(0, 8))),
        then(dies(1), reported={"paused": 0}),
    ],
    "the next world is entered after the agreed step": [
        then(see(1, after=8), told="0 Enter, 1 Enter", orders={"after": [8, 8]}),
        then(WorkerMessage(0, Stopped(0, 9)), commands=[], statuses="training training"),
    ],
    "who is not in the next world stops at the agreed step": [
        then(see(1, me=(0,), after=8), told="0 Enter, 1 Through"),
        then(WorkerMessage(1, Stopped(0, 9)), statuses="training standing"),
    ],
    "the end of the data is reported and ends with the scripts": [
        then(WorkerMessage(1, Finished(0, 12)), reported={"finished": 0}),
        then(FINISHED, orders={"finished": [True, True], "through": [11, 11]}),
        then(WorkerMessage(0, Stopped(0, 12)), reported={"gone": None}),
        then(
            WorkerMessage(1, Stopped(0, 12)), reported={"gone": None}, statuses="finished finished"
        ),
        then(WorkerSucceeded(0, 0), commands=[]),
        then(WorkerSucceeded(0, 1), reported={"done": 0}),
    ],
    "a worker that ends well before the training does has failed": [
        then(WorkerSucceeded(0, 1), failed="before the training was done", spawned=[1])
    ],
    "a failure after the training is reported and nobody replaced": [
        then(FINISHED),
        then(WorkerMessage(0, Stopped(0, 12))),
        then(dies(0, exitcode=1), failed="killed", spawned=[]),
    ],
    "an error of a living worker is reported and it lives on": [
        then(dies(0, alive=True), failed="killed", spawned=[], statuses="training training")
    ],
    "nobody takes the place of one that does not fit unless the others wait for it": [
        then(WorkerMessage(1, Unfit()), commands=[]),
        then(dies(1, message="UnfitError: no"), failed="Unfit", spawned=[]),
        then(see(phase="waiting"), spawned=[1]),
    ],
    "one that is started again after it did not fit has one try until it stands": [
        then(WorkerMessage(1, Unfit())),
        then(dies(1), statuses="training gone"),
        then(see(phase="waiting")),
        then(dies(1, -1), spawned=[]),
        then(see(phase="waiting")),
        then(WorkerMessage(1, Enlisted()), statuses="training standing"),
        then(dies(1, -1), spawned=[1]),
    ],
    "nobody is replaced on a node that leaves": [
        then(LeaveRequested(15)),
        then(dies(1), spawned=[]),
    ],
    "nobody is started for one that does not fit on a node that leaves": [
        then(LeaveRequested(15)),
        then(WorkerMessage(1, Unfit())),
        then(dies(1), spawned=[]),
    ],
    "a lost lease stops the workers, which keep their memory, and no world is entered": [
        then(LeaseLost(), told="0 Over, 1 Over"),
        then(see(1, after=8), commands=[]),
        then(WorkerMessage(0, Stopped(0, 7)), commands=[]),
        then(WorkerMessage(1, Stopped(0, 7)), first=Rejoin(0), reported={"standing": (0, 1)}),
        then(see(5), told="0 Enter, 1 Enter"),
    ],
    "who never heard of a world that waits says that it is gone from here": [
        then(LeaseLost(), told="0 Over, 1 Over"),
        then(WorkerMessage(0, Stopped(0, 7))),
        then(WorkerMessage(1, Stopped(0, 7)), first=Rejoin(0)),
        then(see(2, phase="waiting"), reported={"gone": 2}, spawned=[]),
        then(see(2, phase="waiting"), commands=[]),
        then(see(3), told="0 Enter, 1 Enter"),
    ],
    "a world that waits stops its workers, and missing ones are started": [
        then(WorkerMessage(1, Unfit())),
        then(dies(1), spawned=[]),
        then(see(phase="waiting"), told="0 Over", reported={"gone": None}, spawned=[1]),
        then(WorkerMessage(0, Stopped(0, 7)), reported={"gone": 0}, statuses="standing starting"),
    ],
    "a world that waits revokes the step that its workers were to run through": [
        then(see(phase="over", ending="leave", after=8), told="0 Through, 1 Through"),
        then(see(phase="waiting"), told="0 Over, 1 Over"),
    ],
    "a world that waits without a place for this node has nothing to ask of it": [
        then(FAILED),
        then(WorkerMessage(0, Stopped(0, 7))),
        then(WorkerMessage(1, Stopped(0, 7)), reported={"gone": 0}),
        then(see(2, phase="waiting", me=()), commands=[]),
    ],
    "the first world that waits has no nodes, and stops nobody": [
        then(WorldSeen(World(generation=0, phase="waiting")), commands=[])
    ],
    "a world that was over before this node joined anew is gone from here, too": [
        then(LeaseLost()),
        then(see(2, phase="waiting"), told="0 Over, 1 Over"),
        then(WorkerMessage(0, Stopped(2, 7))),
        then(WorkerMessage(1, Stopped(2, 7)), first=Rejoin(2)),
    ],
    "who lost its lease when the others came to the end of the data is done": [
        then(LeaseLost()),
        then(WorkerMessage(0, Stopped(0, 7))),
        then(WorkerMessage(1, Stopped(0, 7)), first=Rejoin(0)),
        then(FINISHED, reported={"done": 0}),
    ],
    "data that ends in the last step before a world ends that one too": [
        then(see(1, after=8)),
        then(WorkerMessage(0, Finished(0, 8)), reported={"finished": 1}),
    ],
    "who was to begin after the data ended has nothing to finish": [
        then(dies(1)),
        then(WorkerMessage(1, Enlisted())),
        then(see(1, after=8), told="0 Enter, 1 Enter"),
        then(WorkerMessage(0, Finished(0, 8)), reported={"finished": 1}),
        then(see(1, phase="over", ending="finished", after=7), orders={"finished": [True, False]}),
        then(WorkerMessage(0, Stopped(1, 8))),
        then(WorkerMessage(1, Stopped(1, 0)), statuses="finished standing"),
        then(WorkerSucceeded(1, 0), reported={"done": 1}),
    ],
    "a node whose workers have nothing to finish is done": [
        then(dies(0)),
        then(dies(1)),
        then(FINISHED, reported={"done": 0}),
    ],
    "who begins with the last step runs it": [
        then(dies(1)),
        then(WorkerMessage(1, Enlisted())),
        then(see(1, after=8)),
        then(see(1, phase="over", ending="finished", after=8), orders={"finished": [True, True]}),
    ],
    "through is revoked when the world breaks": [
        then(see(phase="over", ending="leave", after=8), told="0 Through, 1 Through"),
        then(FAILED, told="0 Over, 1 Over"),
    ],
    "who has left train gets the signal": [
        then(FINISHED),
        then(WorkerMessage(0, Stopped(0, 12))),
        then(WorkerMessage(1, Stopped(0, 12))),
        then(LeaveRequested(15), last=Stop(15)),
    ],
    "who dies before it has heard that the training is done has not failed": [
        then(FINISHED),
        then(WorkerMessage(0, Stopped(0, 12))),
        then(dies(1), spawned=[]),
        then(WorkerSucceeded(0, 0), reported={"done": 0}),
    ],
    "a leave that takes too long kills": [
        then(LeaveRequested(2)),
        then(LeaveOverdue(), commands=[Stop(9)]),
    ],
    "a second interrupt kills": [
        then(LeaveRequested(2)),
        then(LeaveRequested(2), commands=[Stop(9)]),
    ],
}


@pytest.mark.parametrize("steps", STORIES.values(), ids=STORIES)
def test_in_process_table_decides_story(steps):
    node = training()
    for event, expected in steps:
        commands = node.feed(event)
        said = reported(commands)
        asked = [one.order for one in commands if isinstance(one, Tell)]
        found = {
            "commands": commands,
            "first": commands[0] if commands else None,
            "last": commands[-1] if commands else None,
            "told": told(commands),
            "orders": {
                name: [getattr(order, name) for order in asked]
                for name in expected.get("orders", ())
            },
            "reported": {name: said.get(name) for name in expected.get("reported", ())},
            "spawned": spawned(commands),
            "statuses": node.statuses(),
        }
        if "failed" in expected:
            assert expected["failed"] in said["failures"][0].message
            assert said["failures"][0].generation == 0
            assert not said["failures"][0].fatal
        wanted = {name: value for name, value in expected.items() if name != "failed"}
        assert {name: found[name] for name in wanted} == wanted, event


def test_workers_that_run_already_are_told_to_enter_their_world():
    node = Node(in_process.take_over(running())[0])
    commands = node.feed(see(replica=2))
    assert told(commands) == "0 Enter, 1 Enter"
    order = commands[1].order
    assert (order.rank, order.size, order.local_rank, order.node_rank) == (1, 4, 1, 0)
    assert order.replica == 2
    assert node.feed(see(replica=2)) == []
    assert node.state.sentence() == "serving: workers 2 training"


def test_a_newcomer_starts_workers_before_it_is_in_any_world():
    group = ScriptState(node="a", nproc=2, world=world(me=()))
    state, commands = in_process.take_over(group)
    assert commands[:2] == [Spawn(0), Spawn(1)]
    assert reported(commands)["starting"] == 2
    node = Node(state)
    node.feed(WorkerMessage(0, Enlisted()))
    assert reported(node.feed(WorkerMessage(1, Enlisted()))) == {
        "in_process": True,
        "standing": (0, 1),
        "starting": 0,
    }
    assert told(node.feed(see(1, after=5))) == "0 Enter, 1 Enter"


def test_a_newcomer_whose_replica_spans_nodes_starts_workers_once_its_place_is_known():
    group = ScriptState(node="a", nproc=2, world=world(me=(), replica=4), place=-1)
    state, commands = in_process.take_over(group)
    assert spawned(commands) == []
    node = Node(state)
    commands = node.feed(PlaceAllotted(1))
    assert spawned(commands) == [0, 1]
    assert (reported(commands)["place"], reported(commands)["replica"]) == (1, 4)
    assert node.feed(PlaceAllotted(1)) == []


def test_workers_in_no_world_start_again_with_another_place():
    node = Node(replace(training().state, place=0))
    assert node.feed(PlaceAllotted(1)) == [], "they train"
    node.feed(FAILED)
    assert node.feed(WorkerMessage(0, Stopped(0, 7))) == []
    commands = node.feed(WorkerMessage(1, Stopped(0, 7)))
    assert [one.local_rank for one in commands if isinstance(one, Kill)] == [0, 1]
    assert (reported(commands)["place"], reported(commands)["standing"]) == (1, ())
    assert reported(commands)["gone"] == 0
    assert spawned(node.feed(dies(0))) == [0]


def test_a_worker_whose_mesh_does_not_fit_the_job_is_refused():
    group = ScriptState(node="a", nproc=2, world=world(me=(), replica=2))
    node = Node(in_process.take_over(group)[0])
    (refused,) = node.feed(WorkerMessage(0, Enlisted(1)))
    assert refused == Tell(
        0,
        orders.Closed(
            "its workers made a mesh of 1 workers, but those of other nodes made one of 2 workers"
        ),
    )
    assert spawned(node.feed(dies(0))) == [], "another one would make the same"
    assert told(node.feed(WorkerMessage(1, Enlisted(2)))) == ""


OOM = "killed by SIGKILL: out of memory"
STOP = (
    see(phase="over", ending="resize"),
    WorkerMessage(0, Stopped(0, 7)),
    WorkerMessage(1, Stopped(0, 7)),
)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([dies(1, message=OOM)], OOM),
        ([dies(1, message=OOM), dies(1, -1, message="killed by SIGSEGV")], "lost a peer: "),
        ([*STOP, dies(1)], "killed"),
    ],
    ids=["died in the world before", "its replacement did not live", "died while it stood"],
)
def test_a_world_that_counts_on_a_dead_worker_is_told_what_it_died_of(events, message):
    node = training()
    for event in events:
        node.feed(event)
    commands = node.feed(see(1))
    assert told(commands) == "0 Enter"
    *_, failure = reported(commands)["failures"]
    assert (failure.generation, failure.rank, failure.local_rank) == (1, 1, 1)
    assert failure.message.startswith(message)


def test_standing_worker_killed_from_outside_is_reported_with_its_signal():
    """Its node is not held out for that, although the world ends before its first step."""
    node = training()
    for event in (*STOP, dies(1, -1)):
        node.feed(event)
    *_, failure = reported(node.feed(see(1)))["failures"]
    assert (failure.exitcode, is_from_outside(failure)) == (-9, True)


def test_failures_are_reported_until_the_generation_after_them_is_over():
    """Older ones count for nothing, and a job may lose thousands of workers."""
    node = training()
    for generation in range(5):
        node.feed(see(generation))
        said = reported(node.feed(dies(1)))["failures"]
        assert [one.generation for one in said] == [generation - 1, generation][-generation - 1 :]
        node.feed(see(generation, phase="over", ending="failure"))
        node.feed(WorkerMessage(0, Stopped(generation, 7)))
        node.feed(WorkerMessage(1, Enlisted()))


def test_workers_that_die_before_they_train_are_not_started_for_ever():
    """A node of many leaves when none of its workers can start."""
    node = training()
    for rank, statuses in ((0, "gone training"), (1, "gone gone")):
        commands = node.feed(dies(rank))
        starts = 0
        while Spawn(rank) in commands:
            starts += 1
            commands = node.feed(dies(rank, -1))
        assert starts == in_process.MOST_TRIES
        assert node.statuses() == statuses
    assert reported(commands)["leaving"].startswith("its workers cannot train: ")
    assert Stop(9) in commands


@pytest.mark.parametrize("alone", [True, False])
def test_node_without_fitting_worker_leaves_or_ends_job(alone):
    """Of whom else could the freshest state be? Of workers that are gone by now."""
    node = training()
    if alone:
        seen = world()
        node.feed(
            WorldSeen(replace(seen, phase="over", ending="failure").with_nodes(seen.nodes[:1]))
        )
    for rank in (0, 1):
        node.feed(WorkerMessage(rank, Unfit()))
        commands = node.feed(dies(rank))
    said = reported(commands)
    assert said["failures"][-1].fatal is alone
    assert (Stop(9) in commands) is not alone
    if not alone:
        assert said["leaving"].startswith("its workers cannot train: ")


def test_a_leave_waits_for_the_boundary_then_sends_the_workers_home():
    node = training()
    commands = node.feed(LeaveRequested(15, 99.0))
    assert reported(commands)["leaving"] == "SIGTERM"
    assert told(commands) == ""
    node.feed(see(phase="pausing", ending="leave"))
    assert told(node.feed(see(1, me=(), after=8))) == "0 Through, 1 Through"
    node.feed(WorkerMessage(0, Stopped(0, 9)))
    commands = node.feed(WorkerMessage(1, Stopped(0, 9)))
    leave = orders.Leave(15, 99.0)
    assert [one for one in commands if isinstance(one, Tell)] == [Tell(0, leave), Tell(1, leave)]
    assert commands[-1] == Stop(0)
    node.feed(WorkersGone())
    assert (node.state.is_terminal, node.state.exitcode) == (True, 143)


EVALUATES, WORKS, LAST = (0, 7, math.inf), (0, 7, 1.0), (0, 8, 1.0)


@pytest.mark.parametrize(
    ("shown", "fields", "waited_for"),
    [
        pytest.param((EVALUATES, EVALUATES), {}, True, id="both evaluate"),
        pytest.param((EVALUATES, LAST), {}, True, id="the other one waits, too"),
        pytest.param((EVALUATES, WORKS), {}, False, id="the other one may save"),
        pytest.param((WORKS, LAST), {}, False, id="a long step"),
        pytest.param((LAST, LAST), {}, False, id="all in the last step"),
        pytest.param(
            ((0, 8, math.inf), LAST), {}, False, id="an evaluation in the last step, as the others"
        ),
        pytest.param((EVALUATES, None), {}, False, id="nothing is known"),
        pytest.param((EVALUATES, LAST), {"replica": 2}, False, id="sharded"),
        pytest.param((EVALUATES, LAST), {"after": None}, False, id="not agreed yet"),
        pytest.param((EVALUATES, LAST), {"handing_over": ()}, False, id="not in the last world"),
    ],
)
def test_the_others_wait_for_an_evaluation_that_they_do_not_need(shown, fields, waited_for):
    node = training()
    node.feed(LeaveRequested(15))
    node.feed(see(phase="pausing", ending="leave"))
    agreed = {"after": 8, "handing_over": ("a",), **fields}
    node.feed(see(1, me=(), **agreed))
    assert is_waited_for(node.state, dict(enumerate(shown))) is waited_for
    assert not is_waited_for(replace(node.state, leaving=0), dict(enumerate(shown)))


def test_a_leave_while_nobody_trains_is_immediate():
    node = Node(in_process.take_over(ScriptState(node="a", nproc=1, world=world(me=())))[0])
    assert node.feed(LeaveRequested(15))[-1] == Stop(15)


@pytest.mark.parametrize(
    ("event", "code"),
    [
        pytest.param(see(phase="closed", exitcode=1), 1, id="failed"),
        pytest.param(see(phase="closed", exitcode=0), 0, id="done"),
        pytest.param(StoreLost("gone"), 171, id="without a store"),
    ],
)
def test_the_end_of_the_job_stops_everything(event, code):
    node = training()
    assert node.feed(event) == [Stop(15)]
    assert node.feed(WorkerMessage(0, Stopped(0, 1))) == []
    node.feed(WorkersGone())
    assert (node.state.is_terminal, node.state.exitcode) == (True, code)


def test_report_before_next_world_is_repeated_for_it():
    node = training()
    node.feed(WorkerMessage(0, Finished(0, 8)))
    node.feed(dies(1, alive=True))
    said = reported(node.feed(see(1, after=8)))
    assert (said["finished"], said["finished_after"]) == (1, 8)
    assert said["failures"][-1].generation == 1


# --- Who may be killed when its world is over, and who is waited for -----------------------------


OVER = 4


def live(generation: int = OVER, step: int | None = 7, **more: bool) -> LiveCopy:
    return LiveCopy(generation=generation, step=step, **more)


FREE, FROZEN = live(stopped=True), live(frozen=True)
USABLE = {
    "it has stopped": (FREE, True),
    "before the first step": (live(step=0, stopped=True), True),
    "it has not stopped yet": (live(), False),
    "frozen since": (live(stopped=True, frozen=True), False),
    "about to be killed": (live(stopped=True, doomed=True), False),
    "it came to that world and got no state": (live(step=None, stopped=True), False),
    "it trains in a later world": (live(OVER + 1), True),
    "on the way into a later world": (live(OVER + 1, None), False),
    "it was left behind in an earlier world": (live(OVER - 1, stopped=True), False),
    "a replacement": (live(-1, None), False),
}


@pytest.mark.parametrize(("copy", "usable"), USABLE.values(), ids=USABLE)
def test_from_which_copies_the_next_world_can_go_on(copy, usable):
    assert is_usable(copy, OVER) is usable


#: The worker's copy, others here, whether another node has one, seconds waited, killed.
KILLED = {
    "alone": (FROZEN, [], False, 0.1, False),
    "all are frozen": (FROZEN, [FROZEN, FROZEN], False, 0.1, False),
    "beside a replacement": (FROZEN, [live(-1, None)], False, 0.1, False),
    "another one here is free": (FROZEN, [FROZEN, FREE], False, 0.1, True),
    "another one elsewhere is free": (FROZEN, [FROZEN], True, 0.1, True),
    "its time is up": (FROZEN, [], False, 60.0, True),
    "no step was taken": (live(step=0, frozen=True), [], False, 0.1, True),
    "it has no state": (live(step=None, frozen=True), [], False, 0.1, True),
}


@pytest.mark.parametrize(
    ("own", "others", "elsewhere", "waited", "killed"), KILLED.values(), ids=KILLED
)
def test_worker_may_be_killed_if_its_state_is_elsewhere(own, others, elsewhere, waited, killed):
    found = may_be_killed(own, others, elsewhere=elsewhere, waited=waited, limit=60.0)
    assert found is killed


# --- the comparison of states ---------------------------------------------------------------------


def checked(local_rank: int, digest: int, step: int = 20, generation: int = 0) -> WorkerMessage:
    return WorkerMessage(local_rank, orders.Checked(generation, step, digest, 0, 10))


def test_hashes_are_reported_when_every_worker_has_hashed_the_same_step():
    node = training()
    assert node.feed(checked(0, 7)) == []
    assert node.feed(checked(1, 8, step=10)) == []
    found = reported(node.feed(checked(1, 9)))
    assert [one[:3] for one in found["checked"]] == [(0, 20, 7), (1, 20, 9)]
    assert found["checked_in"] == 0


def test_verdict_on_equal_states_is_told_once_to_the_workers_of_that_world():
    node = training()
    assert told(node.feed(see(certified=20))) == "0 Certified, 1 Certified"
    assert told(node.feed(see(certified=20))) == ""
    assert told(node.feed(see(certified=20, phase="pausing"))) == "0 Ask, 1 Ask"
    (command, _) = node.feed(see(certified=20, unchecked="no majority"))
    assert command.order == orders.Certified(0, 20, "no majority")


def test_worker_with_a_wrong_state_is_killed_and_the_next_world_says_what_is_void():
    node = training()
    rewind = Rewind(1, 0, 10)
    commands = node.feed(see(phase="over", ending="failure", rewind=rewind, wrong=(1,)))
    assert told(commands) == "0 Over"
    assert [one.local_rank for one in commands if isinstance(one, Kill)] == [1]
    assert "gone" not in reported(node.feed(WorkerMessage(0, Stopped(0, 20))))
    assert reported(node.feed(dies(1)))["gone"] == 0
    (enter,) = node.feed(see(1, me=(0,), rewind=rewind))[:1]
    assert enter.order.rewind == (1, 0, 10)
