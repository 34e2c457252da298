"""The workers of one node, by table."""

from __future__ import annotations

import pytest

from torchelastic.agent.group_state import (
    GroupState,
    InvalidTransition,
    LeaseLost,
    LeaveRequested,
    Phase,
    Rejoin,
    Report,
    Start,
    Stop,
    StoreLost,
    Tell,
    WorkerCanSave,
    WorkerEnlisted,
    WorkerFailed,
    WorkersGone,
    WorkerSucceeded,
    WorkersUp,
    WorldSeen,
    handle,
)
from torchelastic.failure import Failure
from torchelastic.rendezvous.world import World, WorldNode
from torchelastic.worker.orders import Leave


def world(generation=0, phase="running", nodes="ab", **fields):
    placed = tuple(
        WorldNode(
            node=name,
            name=name,
            addr=name,
            node_rank=place,
            nproc=2,
            role="default",
            first_rank=0,
            first_role_rank=0,
            local_ranks=(0, 1),
        )
        for place, name in enumerate(nodes)
    )
    made = World(generation=generation, phase=phase, store="a:1", **fields)
    return made.with_nodes(placed)


def failure(local_rank=0, generation=0):
    return Failure(
        generation=generation,
        node="a",
        rank=local_rank,
        local_rank=local_rank,
        pid=7,
        exitcode=1,
        message="ValueError: no",
    )


def gone(generation: int, **more: int) -> Report:
    """No worker is left: neither are resident ones."""
    return Report({"gone": generation, "resident": False, "standing": (), **more})


class Node:
    """Feeds events and remembers commands."""

    def __init__(self, *events, nproc=2):
        self.state = GroupState(node="a", nproc=nproc)
        self.commands = []
        self.feed(*events)

    def feed(self, *events):
        self.commands = []
        for event in events:
            self.state, commands = handle(self.state, event)
            self.commands += commands
        return self.commands


def running():
    return Node(WorldSeen(world()), WorkersUp(0))


def test_a_world_with_a_place_for_us_starts_workers():
    node = Node()
    assert node.feed(WorldSeen(world())) == [Start(world())]
    assert node.state.phase is Phase.STARTING
    assert node.feed(WorkersUp(0)) == []
    assert node.state.phase is Phase.RUNNING


@pytest.mark.parametrize("phase", ["waiting", "running"])
def test_a_world_without_us_starts_nothing(phase):
    node = Node()
    assert node.feed(WorldSeen(world(phase=phase, nodes="bc"))) == []
    assert node.state.phase is Phase.IDLE


def test_a_spare_says_so():
    node = Node(WorldSeen(world(nodes="bc")))
    assert node.state.sentence() == "spare beside generation 0"


def test_a_spare_reports_gone_when_the_world_is_over():
    node = Node(WorldSeen(world(nodes="bc")))
    assert node.feed(WorldSeen(world(phase="over", nodes="bc"))) == [Report({"gone": 0})]


def test_the_first_failure_is_reported_before_anything_is_stopped():
    node = running()
    assert node.feed(WorkerFailed(failure())) == [Report({"failures": (failure(),)}), Stop(15)]
    assert node.feed(WorkerFailed(failure(1))) == [Report({"failures": (failure(), failure(1))})]
    assert node.feed(WorkersGone()) == [gone(0)]
    assert node.state.phase is Phase.IDLE
    assert node.feed(WorldSeen(world(1))) == [Start(world(1))]
    assert node.state.failures == ()


def test_over_stops_the_workers_and_the_next_world_starts_them():
    node = running()
    assert node.feed(WorldSeen(world(phase="over"))) == [Stop(15)]
    assert node.feed(WorkersGone()) == [gone(0), Report({"gone": 0})]
    assert node.feed(WorldSeen(world(1))) == [Start(world(1))]


def test_a_world_that_came_while_stopping_is_not_forgotten():
    node = running()
    node.feed(WorldSeen(world(phase="over")), WorldSeen(world(1)))
    assert node.feed(WorkersGone()) == [gone(0), Start(world(1))]


def test_a_newer_world_stops_the_workers_of_the_older_one_first():
    node = running()
    assert node.feed(WorldSeen(world(3))) == [Stop(15)]
    assert node.feed(WorkersGone()) == [gone(0), Start(world(3))]


def test_the_same_world_twice_starts_once():
    node = running()
    assert node.feed(WorldSeen(world())) == []
    assert node.state.phase is Phase.RUNNING


def test_success_is_reported_when_the_last_worker_is_done():
    node = running()
    assert node.feed(WorkerSucceeded(0, 1)) == []
    assert node.feed(WorkerSucceeded(0, 0)) == [Stop(15)]
    assert node.feed(WorkersGone()) == [gone(0, done=0)]
    assert node.state.sentence() == "done with generation 0, waiting for the others"


def test_workers_quicker_than_the_news_of_their_start():
    node = Node(WorldSeen(world()))
    assert node.feed(WorkerSucceeded(0, 0), WorkerSucceeded(0, 1)) == []
    assert node.feed(WorkersUp(0)) == [Stop(15)]
    assert node.feed(WorkersGone()) == [gone(0, done=0)]


def test_done_nodes_start_again_when_another_node_failed():
    node = running()
    node.feed(WorkerSucceeded(0, 0), WorkerSucceeded(0, 1), WorkersGone())
    assert node.feed(WorldSeen(world(phase="over"))) == [Report({"gone": 0})]
    assert node.feed(WorldSeen(world(1))) == [Start(world(1))]


def test_closed_ends_with_the_jobs_exit_code_after_the_workers_are_gone():
    node = running()
    assert node.feed(WorldSeen(world(phase="closed", exitcode=1, reason="no"))) == [Stop(15)]
    node.feed(WorkersGone())
    assert (node.state.phase, node.state.exitcode, node.state.reason) == (Phase.ENDED, 1, "no")


def test_a_leave_is_announced_and_the_signal_passed_on_at_once():
    node = running()
    assert node.feed(LeaveRequested(15)) == [Report({"leaving": "SIGTERM"}), Stop(15)]
    assert node.feed(LeaveRequested(15)) == []
    node.feed(WorkersGone())
    assert (node.state.phase, node.state.exitcode) == (Phase.ENDED, 143)


def saving():
    """A node that leaves, one worker of which can put the state into storage."""
    node = running()
    node.feed(WorkerCanSave(0))
    return node


def test_who_can_store_the_state_is_told_before_anybody_else_and_ends_by_itself():
    assert saving().feed(LeaveRequested(15, 99.0)) == [
        Tell(0, Leave(15, 99.0)),
        Report({"leaving": "SIGTERM"}),
        Stop(15, told=frozenset({0})),
    ]


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
    node = saving()
    node.feed(LeaveRequested(15, 99.0))
    told = [] if saves is None else [Tell(0, Leave(15, 99.0, saves))]
    assert node.feed(WorldSeen(seen)) == told


def test_a_second_interrupt_is_also_for_who_stores_the_state():
    node = saving()
    node.feed(LeaveRequested(2, 99.0))
    assert node.feed(LeaveRequested(2, 99.0)) == [Stop(9)]


def test_workers_that_are_being_stopped_store_nothing():
    node = saving()
    node.feed(WorldSeen(world(phase="over")))
    assert node.feed(LeaveRequested(15, 99.0)) == [Report({"leaving": "SIGTERM"}), Stop(15)]
    assert node.feed(WorldSeen(world(phase="over", saver="a"))) == []


def test_a_worker_that_has_ended_is_not_waited_for():
    node = saving()
    node.feed(WorkerSucceeded(0, 0))
    commands = node.feed(LeaveRequested(15, 99.0))
    assert commands == [Report({"leaving": "SIGTERM"}), Stop(15)]


def test_workers_of_the_next_generation_have_yet_to_say_what_they_can():
    node = saving()
    node.feed(WorldSeen(world(phase="over")), WorkersGone(), WorldSeen(world(1)), WorkersUp(1))
    assert node.feed(LeaveRequested(15)) == [Report({"leaving": "SIGTERM"}), Stop(15)]


def test_a_second_interrupt_means_now():
    node = running()
    assert node.feed(LeaveRequested(2)) == [Report({"leaving": "SIGINT"}), Stop(2)]
    assert node.feed(LeaveRequested(2)) == [Stop(9)]


def test_a_leave_while_idle_ends_at_once():
    node = Node()
    assert node.feed(LeaveRequested(2)) == [Report({"leaving": "SIGINT"})]
    assert (node.state.phase, node.state.exitcode) == (Phase.ENDED, 130)


def test_a_leave_while_stopping_reaches_the_workers_too():
    node = running()
    node.feed(WorldSeen(world(phase="over")))
    assert node.feed(LeaveRequested(15)) == [Report({"leaving": "SIGTERM"}), Stop(15)]


def test_a_lost_lease_stops_the_workers_before_joining_anew():
    node = running()
    assert node.feed(LeaseLost()) == [Stop(9)]
    assert node.feed(WorldSeen(world(1, nodes="bc"))) == []
    assert node.feed(WorkersGone()) == [Rejoin(0)]
    assert node.state.phase is Phase.IDLE


def test_a_lost_store_stops_the_workers_and_ends():
    node = running()
    assert node.feed(StoreLost("out of reach")) == [Stop(15)]
    node.feed(WorkersGone())
    assert (node.state.phase, node.state.exitcode) == (Phase.ENDED, 171)
    assert node.state.reason == "out of reach"


def test_a_lost_store_while_idle_ends_at_once():
    node = Node(StoreLost("out of reach"))
    assert (node.state.phase, node.state.exitcode) == (Phase.ENDED, 171)


def test_an_event_out_of_place_is_a_bug_and_tells_where():
    with pytest.raises(InvalidTransition, match="WorkersGone while running, generation 0"):
        running().feed(WorkersGone())


@pytest.mark.parametrize("first", ["ends", "enlists"])
def test_workers_that_wait_in_train_for_one_that_has_ended_fail(first):
    node = running()
    events = [WorkerSucceeded(0, 1), WorkerEnlisted(0)]
    commands: list = []
    for event in events if first == "ends" else reversed(events):
        commands += node.feed(event)
    failures = next(command for command in commands if isinstance(command, Report))
    failure = failures.changes["failures"][0]
    assert failure.fatal
    assert "without calling torchelastic.train" in failure.message
