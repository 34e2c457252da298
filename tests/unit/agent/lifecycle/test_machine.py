"""The machine of a node: the table in charge, the facts in its reports, the printed transitions."""

from dataclasses import replace

import pytest

from tests.unit.agent.lifecycle.test_script import RUNNING, failure, world
from torchelastic.agent.lifecycle import in_process
from torchelastic.agent.lifecycle.in_process import InProcessState
from torchelastic.agent.lifecycle.machine import KEPT, LONGEST, Machine
from torchelastic.agent.lifecycle.node_state import (
    InvalidTransition,
    LeaseLost,
    Named,
    PlaceAllotted,
    ReportMember,
    Spawn,
    StoreLost,
    Tell,
    WorkerFailed,
    WorkerProgress,
    WorkersUp,
    WorldSeen,
)
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.worker import orders

SEEN = WorkerProgress(step=7, trained=2, holds=3, blank=(1,))


def running(**fields):
    machine = Machine(ScriptState(node="a", nproc=2, **fields))
    for event in RUNNING:
        machine.take(event, WorkerProgress())
    return machine


def test_report_includes_progress_of_workers():
    [report, _] = running().take(WorkerFailed(failure(0)), SEEN)
    facts = {"step": 7, "trained": 2, "holds": 3}
    assert report == ReportMember({**facts, "failures": (failure(0),)})


def test_report_in_sharded_world_names_workers_without_the_state():
    machine = running()
    machine.take(WorldSeen(world(replica=2)), WorkerProgress())
    [report, _] = machine.take(WorkerFailed(failure(0)), SEEN)
    assert report.changes["blank"] == (1,)


def test_resident_world_hands_running_workers_to_other_table():
    machine = running()
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


def test_error_about_in_process_workers_lists_last_transitions():
    machine = Machine(in_process.alone("n", "host"))
    with pytest.raises(InvalidTransition, match="The last 0 transitions"):
        machine.take("an unknown event", WorkerProgress())


def test_ring_of_transitions_stays_small_in_large_job():
    machine = Machine(ScriptState(node="n"))
    for number in range(1000):
        machine.take(PlaceAllotted(number + 10**200), WorkerProgress())
    lines = str(machine).splitlines()[1:]
    assert len(lines) == KEPT
    assert all(len(line) < 2 * LONGEST + 40 for line in lines)
    assert lines[-1].startswith("  [waiting for a world] PlaceAllotted(place=1000")
