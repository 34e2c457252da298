"""The node's machine and the workers of a script, by table."""

from dataclasses import replace

import pytest

from tests.unit.agent.cast import place
from torchelastic.agent.lifecycle.in_process import InProcessState
from torchelastic.agent.lifecycle.machine import KEPT, LONGEST, Machine
from torchelastic.agent.lifecycle.node_state import (
    InvalidTransition,
    LeaseLost,
    LeaveRequested,
    Named,
    Phase,
    PlaceAllotted,
    Rejoin,
    ReportMember,
    Spawn,
    StartWorkers,
    Stop,
    StoreLost,
    Tell,
    WorkerFailed,
    WorkerMessage,
    WorkerProgress,
    WorkerReturned,
    WorkersGone,
    WorkerSucceeded,
    WorkersUp,
    WorldSeen,
)
from torchelastic.agent.lifecycle.script import ScriptState, handle
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders
from torchelastic.worker.orders import CanSave, Enlisted, Leave, Saved


def world(generation=0, phase="running", nodes="ab", **fields):
    made = World(generation=generation, phase=phase, store="a:1", **fields)
    return made.with_nodes(place(name, at) for at, name in enumerate(nodes))


def failure(rank):
    facts = {"pid": 7, "exitcode": 1, "message": "ValueError: no"}
    return Failure(generation=0, node="a", rank=rank, local_rank=rank, **facts)


def seen(*args, **fields) -> WorldSeen:
    return WorldSeen(world(*args, **fields))


def gone(generation: int, **more: int) -> ReportMember:
    """No worker is left: neither are in-process ones."""
    return ReportMember({"gone": generation, "in_process": False, "standing": (), **more})


NONE_IN_PROCESS = ReportMember({"in_process": False, "standing": ()})


class Node:
    """Feeds events and returns commands."""

    def __init__(self, *events):
        self.state = ScriptState(node="a", nproc=2)
        self.feed(*events)

    def feed(self, *events):
        found = []
        for event in events:
            self.state, commands = handle(self.state, event)
            found += commands
        return found


RUNNING = (seen(), WorkersUp(0))
#: One worker can put the state into storage.
SAVING = (*RUNNING, WorkerMessage(0, CanSave()))
TOGETHER = (
    *RUNNING,
    WorkerMessage(0, CanSave(together=True)),
    WorkerMessage(1, CanSave(together=True)),
)
LEAVE = Leave(15, 99.0)
GO = [Tell(rank, Leave(15, 99.0, saves=False)) for rank in (0, 1)]
DONE = (*RUNNING, WorkerSucceeded(0, 0), WorkerSucceeded(0, 1), WorkersGone())
OVER = seen(phase="over")
LEAVES = [ReportMember({"leaving": "SIGTERM"}), Stop(15)]


def story(before, *steps, **state):
    """Play the events before, then one more: return its commands and the state."""
    return before, steps, state


STORIES = {
    "a world with a place for us starts workers": story(
        (), (seen(), [StartWorkers(world())]), (WorkersUp(0), []), phase=Phase.RUNNING
    ),
    "a world without us starts nothing, and its end finds nobody here": story(
        (),
        (seen(nodes="bc"), []),
        (seen(phase="over", nodes="bc"), [ReportMember({"gone": 0})]),
        phase=Phase.IDLE,
    ),
    "nobody starts while others are waited for": story(
        (), (seen(phase="waiting", nodes="bc"), []), phase=Phase.IDLE
    ),
    "who never heard of a world that waits has no worker of it, and says so": story(
        (),
        (seen(2, phase="waiting"), [ReportMember({"gone": 2})]),
        (seen(3), [StartWorkers(world(3))]),
    ),
    "so does a node that joins anew after a cut": story(
        (*RUNNING, LeaseLost(), WorkersGone()),
        (seen(2, phase="waiting"), [ReportMember({"gone": 2})]),
    ),
    "the first world that waits has no nodes, and the number of the first real one": story(
        (), (seen(phase="waiting", nodes=""), []), (seen(), [StartWorkers(world())])
    ),
    "a world that waits has no workers: they stop": story(
        RUNNING,
        (seen(phase="waiting"), [Stop(15)]),
        (WorkersGone(), [gone(0), ReportMember({"gone": 0})]),
        phase=Phase.IDLE,
    ),
    "a later one neither, whoever was in it": story(
        RUNNING, (seen(2, phase="waiting", nodes="bc"), [Stop(15)]), (WorkersGone(), [gone(0)])
    ),
    "an empty store that waits for nodes stops nobody": story(
        RUNNING, (seen(phase="waiting", nodes=""), []), phase=Phase.RUNNING
    ),
    "a world that came and went while workers were stopping is gone from here, too": story(
        (*RUNNING, OVER, seen(2, phase="waiting")),
        (WorkersGone(), [gone(0), ReportMember({"gone": 2})]),
    ),
    "the first failure is reported before anything is stopped": story(
        RUNNING,
        (WorkerFailed(failure(0)), [ReportMember({"failures": (failure(0),)}), Stop(15)]),
        (WorkerFailed(failure(1)), [ReportMember({"failures": (failure(0), failure(1))})]),
        (WorkersGone(), [gone(0)]),
        (seen(1), [StartWorkers(world(1))]),
        failures=(),
    ),
    "over stops the workers and the next world starts them": story(
        RUNNING,
        (OVER, [Stop(15)]),
        (WorkersGone(), [gone(0), ReportMember({"gone": 0})]),
        (seen(1), [StartWorkers(world(1))]),
    ),
    "a world that came while stopping is not forgotten": story(
        (*RUNNING, OVER, seen(1)), (WorkersGone(), [gone(0), StartWorkers(world(1))])
    ),
    "a newer world stops the workers of the older one first": story(
        RUNNING, (seen(3), [Stop(15)]), (WorkersGone(), [gone(0), StartWorkers(world(3))])
    ),
    "the same world twice starts once": story(RUNNING, (seen(), []), phase=Phase.RUNNING),
    "success is reported when the last worker is done": story(
        RUNNING,
        (WorkerSucceeded(0, 1), []),
        (WorkerSucceeded(0, 0), [Stop(15)]),
        (WorkersGone(), [gone(0, done=0)]),
    ),
    "workers are quicker than the news of their start": story(
        (seen(),),
        (WorkerSucceeded(0, 0), []),
        (WorkerSucceeded(0, 1), []),
        (WorkersUp(0), [Stop(15)]),
        (WorkersGone(), [gone(0, done=0)]),
    ),
    "done nodes start again when another node failed": story(
        DONE, (OVER, [ReportMember({"gone": 0})]), (seen(1), [StartWorkers(world(1))])
    ),
    "the first program that returns is reported, and no other": story(
        RUNNING,
        (WorkerReturned(0, 1), [ReportMember({"returned": 0})]),
        (WorkerReturned(0, 0), []),
        (WorkerSucceeded(0, 1), []),
        (WorkerSucceeded(0, 0), [Stop(15)]),
        (WorkersGone(), [gone(0, done=0)]),
    ),
    "programs that had returned when their world was over, and then succeed, are done": story(
        (*RUNNING, WorkerReturned(0, 0), WorkerReturned(0, 1)),
        (OVER, [Stop(15)]),
        (WorkerSucceeded(0, 0), []),
        (WorkerSucceeded(0, 1), []),
        (WorkersGone(), [gone(0, done=0), ReportMember({"gone": 0})]),
    ),
    "a program that exits with 0 because it was told to stop is not done": story(
        (*RUNNING, WorkerReturned(0, 0), OVER, WorkerReturned(0, 1)),
        (WorkerSucceeded(0, 0), []),
        (WorkerSucceeded(0, 1), []),
        (WorkersGone(), [gone(0), ReportMember({"gone": 0})]),
    ),
    "a node that leaves lets programs end that have returned, and reports it": story(
        (*RUNNING, WorkerReturned(0, 0), WorkerReturned(0, 1)),
        (LeaveRequested(15), [LEAVES[0], Stop(15, told=frozenset({0, 1}))]),
        (WorkerSucceeded(0, 0), []),
        (WorkerSucceeded(0, 1), []),
        (WorkersGone(), [ReportMember({"gone": 0, "done": 0})]),
        phase=Phase.ENDED,
        exitcode=143,
    ),
    "a world begins with programs that have not returned": story(
        (*RUNNING, WorkerReturned(0, 0), OVER, WorkersGone(), seen(1)),
        (WorkerReturned(0, 1), []),
        (WorkerReturned(1, 1), [ReportMember({"returned": 1})]),
    ),
    "closed ends with the job's exit code after the workers are gone": story(
        RUNNING,
        (seen(phase="closed", exitcode=1, reason="no"), [Stop(15)]),
        (WorkersGone(), None),
        phase=Phase.ENDED,
        exitcode=1,
        reason="no",
    ),
    "a leave is announced and the signal passed on at once": story(
        RUNNING,
        (LeaveRequested(15), LEAVES),
        (LeaveRequested(15), []),
        (WorkersGone(), None),
        phase=Phase.ENDED,
        exitcode=143,
    ),
    "who can store the state is told before anybody else and ends by itself": story(
        SAVING,
        (
            LeaveRequested(15, 99.0),
            [Tell(0, Leave(15, 99.0)), LEAVES[0], Stop(15, told=frozenset({0}))],
        ),
    ),
    "who stores the state together with others does so before they learn of the leave": story(
        TOGETHER,
        (
            LeaveRequested(15, 99.0),
            [Tell(0, LEAVE), Tell(1, LEAVE), Stop(15, told=frozenset({0, 1}))],
        ),
        (WorkerMessage(1, Saved()), []),
        (WorkerMessage(0, Saved()), [LEAVES[0], *GO]),
        (WorkerMessage(0, Saved()), []),  # it had given up before, and is done now
        (WorkersGone(), []),
        phase=Phase.ENDED,
    ),
    "who stores the state together goes at once when others have stopped": story(
        (*TOGETHER, LeaveRequested(15, 99.0)),
        (seen(), []),
        (OVER, [LEAVES[0], *GO]),
        (WorkerMessage(0, Saved()), []),
    ),
    "a leave is announced at last if those who store the state are gone": story(
        (*TOGETHER, LeaveRequested(15, 99.0)), (WorkersGone(), [LEAVES[0]]), phase=Phase.ENDED
    ),
    "a leave reaches workers that are being stopped, together or not": story(
        (*TOGETHER, OVER), (LeaveRequested(15, 99.0), LEAVES), (WorkersGone(), [])
    ),
    "a second interrupt means now": story(
        RUNNING,
        (LeaveRequested(2), [ReportMember({"leaving": "SIGINT"}), Stop(2)]),
        (LeaveRequested(2), [Stop(9)]),
    ),
    "a second interrupt is also for who stores the state": story(
        (*SAVING, LeaveRequested(2, 99.0)), (LeaveRequested(2, 99.0), [Stop(9)])
    ),
    "a leave reaches workers that are being stopped, and they store nothing": story(
        (*SAVING, OVER), (LeaveRequested(15, 99.0), LEAVES), (seen(phase="over", saver="a"), [])
    ),
    "a worker that has ended is not waited for": story(
        (*SAVING, WorkerSucceeded(0, 0)), (LeaveRequested(15, 99.0), LEAVES)
    ),
    "workers of the next generation have yet to say what they can": story(
        (*SAVING, OVER, WorkersGone(), seen(1), WorkersUp(1)), (LeaveRequested(15), LEAVES)
    ),
    "a leave while idle ends at once": story(
        (),
        (LeaveRequested(2), [ReportMember({"leaving": "SIGINT"})]),
        phase=Phase.ENDED,
        exitcode=130,
    ),
    "a lost lease stops the workers before joining anew": story(
        RUNNING,
        (LeaseLost(), [Stop(9)]),
        (seen(1, nodes="bc"), []),
        (WorkersGone(), [NONE_IN_PROCESS, Rejoin(0)]),
        phase=Phase.IDLE,
    ),
    "a lost lease starts nobody in a world that was seen before it": story(
        (*RUNNING, OVER, seen(1), LeaseLost()),
        (WorkersGone(), [NONE_IN_PROCESS, Rejoin(0)]),
        (seen(1, phase="over"), [ReportMember({"gone": 1})]),
    ),
    "a lost store stops the workers and ends": story(
        RUNNING,
        (StoreLost("out of reach"), [Stop(15)]),
        (WorkersGone(), None),
        phase=Phase.ENDED,
        exitcode=171,
        reason="out of reach",
    ),
    "a lost store while idle ends at once": story(
        (), (StoreLost("out of reach"), None), phase=Phase.ENDED, exitcode=171
    ),
}


@pytest.mark.parametrize(("before", "steps", "state"), STORIES.values(), ids=STORIES)
def test_script_table_decides_story(before, steps, state):
    node = Node(*before)
    for event, commands in steps:
        found = node.feed(event)
        assert commands is None or found == commands, event
    assert {name: getattr(node.state, name) for name in state} == state


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ((seen(nodes="bc"),), "waiting beside generation 0"),
        (DONE, "done with generation 0, waiting for the others"),
    ],
)
def test_a_node_that_waits_says_what_for(events, sentence):
    assert Node(*events).state.sentence() == sentence


@pytest.mark.parametrize(
    ("seen", "saves"),
    [
        (world(phase="over", saver="a"), True),
        (world(phase="over", saver="b"), False),
        (world(phase="over"), False),
        (world(1, nodes="bc", saver="a"), True),
        (world(1, nodes="bc", saver="b"), False),
        (world(phase="closed", saver="a"), True),
        (world(), None),
        (world(-1, phase="over", saver="a"), None),
    ],
)
def test_the_leader_has_said_which_node_stores_the_state(seen, saves):
    node = Node(*SAVING, LeaveRequested(15, 99.0))
    told = [] if saves is None else [Tell(0, Leave(15, 99.0, saves))]
    assert node.feed(WorldSeen(seen)) == told


@pytest.mark.parametrize(
    ("meshes", "report"), [((2, 2), {"replica": 2}), ((0, 0), {}), ((2, 4), None)]
)
def test_the_workers_of_a_node_make_meshes_of_one_size(meshes, report):
    commands = Node(*RUNNING).feed(
        *(WorkerMessage(rank, Enlisted(mesh)) for rank, mesh in enumerate(meshes))
    )
    changes = next(command for command in commands if isinstance(command, ReportMember)).changes
    if report is not None:
        assert changes == {"in_process": True, "standing": (0, 1), **report}
    else:
        (failure,) = changes["failures"]
        assert failure.fatal
        assert "meshes of different sizes: 2 and 4" in failure.message


def test_a_place_in_a_replica_is_taken_in_every_phase():
    for events in ((), (seen(),), RUNNING, (*RUNNING, WorkerFailed(failure(0)))):
        node = Node(*events)
        assert node.feed(PlaceAllotted(1)) == [ReportMember({"place": 1})]
        assert node.state.place == 1


@pytest.mark.parametrize("ends_first", [True, False])
def test_workers_that_wait_in_train_for_one_that_has_ended_fail(ends_first):
    events = [WorkerSucceeded(0, 1), WorkerMessage(0, Enlisted())]
    commands = Node(*RUNNING).feed(*(events if ends_first else reversed(events)))
    failures = next(command for command in commands if isinstance(command, ReportMember))
    failure = failures.changes["failures"][0]
    assert failure.fatal
    assert "without calling torchelastic.train" in failure.message


# --- The machine: the table in charge, the facts in its reports, the printed transitions ----------


SEEN = WorkerProgress(step=7, trained=2, holds=3, blank=(1,))


def machine_of(**fields):
    machine = Machine(ScriptState(node="a", nproc=2, **fields))
    for event in RUNNING:
        machine.take(event, WorkerProgress())
    return machine


def test_report_includes_progress_of_workers():
    [report, _] = machine_of().take(WorkerFailed(failure(0)), SEEN)
    facts = {"step": 7, "trained": 2, "holds": 3}
    assert report == ReportMember({**facts, "failures": (failure(0),)})


def test_report_in_sharded_world_names_workers_without_the_state():
    machine = machine_of()
    machine.take(WorldSeen(world(replica=2)), WorkerProgress())
    [report, _] = machine.take(WorkerFailed(failure(0)), SEEN)
    assert report.changes["blank"] == (1,)


def test_resident_world_hands_running_workers_to_other_table():
    machine = machine_of()
    machine.take(Named("host-1"), WorkerProgress())
    again = replace(world(), in_process=True)
    report, *told = machine.take(WorldSeen(again), SEEN)
    assert isinstance(machine.state, InProcessState)
    assert machine.state.name == "host-1"
    assert report.changes["standing"] == (0, 1)
    assert [type(each.order) for each in told if isinstance(each, Tell)] == [orders.Enter] * 2


def test_resident_world_starts_workers_of_idle_node():
    machine = Machine(ScriptState(node="c", nproc=1))
    commands = machine.take(WorldSeen(replace(world(1, "waiting"), in_process=True)), SEEN)
    assert Spawn(0) in commands


def test_error_about_script_lists_last_transitions():
    machine = Machine(ScriptState(node="n"))
    machine.take(LeaseLost(), WorkerProgress())
    machine.take(StoreLost("the host is gone"), WorkerProgress())
    with pytest.raises(InvalidTransition) as raised:
        machine.take(WorkersUp(3), WorkerProgress())
    first, title, *lines = str(raised.value).splitlines()
    assert first.startswith("WorkersUp while ended")
    assert title == "The last 2 transitions, oldest first:"
    assert lines[0].startswith("  [waiting for a world] LeaseLost() -> Rejoin(")
    assert lines[1].startswith("  [waiting for a world] StoreLost(reason='the host is gone') -> ")


def test_ring_of_transitions_stays_small_in_large_job():
    machine = Machine(ScriptState(node="n"))
    for number in range(1000):
        machine.take(PlaceAllotted(number + 10**200), WorkerProgress())
    lines = str(machine).splitlines()[1:]
    assert len(lines) == KEPT
    assert all(len(line) < 2 * LONGEST + 40 for line in lines)
    assert lines[-1].startswith("  [waiting for a world] PlaceAllotted(place=1000")
