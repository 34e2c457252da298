"""The resident workers of one node, by table: what is told, started, reported and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.agent import crew, group_state
from torchelastic.agent.crew import CrewState, LeaveOverdue, Said, Spawn, Status, Tell
from torchelastic.agent.group_state import (
    GroupState,
    LeaseLost,
    LeaveRequested,
    Rejoin,
    Report,
    Stop,
    StoreLost,
    WorkerFailed,
    WorkersGone,
    WorkerSucceeded,
    WorldSeen,
)
from torchelastic.failure import Failure
from torchelastic.rendezvous.world import World, WorldNode
from torchelastic.worker import orders


def world(generation: int = 0, phase: str = "running", me=(0, 1), **fields) -> World:
    """This node `a` with these workers, beside a node `b` with two."""
    nodes = []
    for name, ranks in (("a", me), ("b", (0, 1))):
        if ranks:
            nodes.append(
                WorldNode(
                    node=name,
                    name=name,
                    addr=name,
                    node_rank=len(nodes),
                    nproc=len(ranks),
                    role="default",
                    first_rank=sum(node.nproc for node in nodes),
                    first_role_rank=0,
                    local_ranks=tuple(ranks),
                )
            )
    made = World(generation=generation, phase=phase, store="b:1", resident=True)
    return replace(made.with_nodes(nodes), **fields)


class Node:
    def __init__(self, state: CrewState) -> None:
        self.state = state

    def feed(self, event: crew.Event) -> list[crew.Command]:
        self.state, commands = crew.handle(self.state, event)
        return commands

    def see(self, seen: World) -> list[crew.Command]:
        return self.feed(WorldSeen(seen))

    def say(self, local_rank: int, report: orders.Report) -> list[crew.Command]:
        return self.feed(Said(local_rank, report))

    def die(self, local_rank: int, generation: int | None = None, **fields) -> list[crew.Command]:
        return self.feed(WorkerFailed(failure(self, local_rank, generation, **fields)))

    def statuses(self) -> str:
        return " ".join(worker.status.value for worker in self.state.workers.values())


def failure(node: Node, local_rank: int, generation: int | None = None, **fields) -> Failure:
    if generation is None:
        generation = node.state.workers[local_rank].generation
    facts = {"node": "a", "rank": local_rank, "pid": 9, "exitcode": -9, "message": "killed"}
    return Failure(generation=generation, local_rank=local_rank, **{**facts, **fields})


def training(generation: int = 0) -> Node:
    """A node whose two workers are in a world with those of another one."""
    group = GroupState(
        node="a",
        nproc=2,
        phase=group_state.Phase.RUNNING,
        generation=generation,
        world=world(generation),
    )
    state, _ = crew.take_over(group, "a")
    node = Node(state)
    node.see(world(generation))
    return node


def told(commands: list[crew.Command]) -> list[tuple[int, str]]:
    """Who is told what, in short."""
    return [
        (command.local_rank, type(command.order).__name__)
        for command in commands
        if isinstance(command, Tell)
    ]


def reported(commands: list[crew.Command]) -> dict[str, object]:
    merged: dict[str, object] = {}
    for command in commands:
        if isinstance(command, Report):
            merged.update(command.changes)
    return merged


def test_workers_that_run_already_are_told_to_enter_their_world():
    group = GroupState(
        node="a", nproc=2, phase=group_state.Phase.RUNNING, generation=0, world=world()
    )
    state, commands = crew.take_over(group, "a")
    assert not [command for command in commands if isinstance(command, Spawn)]
    node = Node(state)
    commands = node.see(world())
    assert told(commands) == [(0, "Enter"), (1, "Enter")]
    order = commands[1].order
    assert (order.rank, order.size, order.local_rank, order.node_rank) == (1, 4, 1, 0)
    assert node.see(world()) == []


def test_a_newcomer_starts_workers_before_it_is_in_any_world():
    group = GroupState(node="a", nproc=2, world=world(me=()))
    state, commands = crew.take_over(group, "a")
    assert commands[:2] == [Spawn(0), Spawn(1)]
    assert reported(commands)["starting"] == 2
    node = Node(state)
    node.say(0, orders.Enlisted())
    assert reported(node.say(1, orders.Enlisted())) == {
        "resident": True,
        "standing": (0, 1),
        "starting": 0,
    }
    assert told(node.see(world(1, after=5))) == [(0, "Enter"), (1, "Enter")]


def test_a_dead_worker_is_reported_and_replaced():
    node = training()
    commands = node.die(1)
    assert Spawn(1) in commands
    assert reported(commands)["standing"] == (0,)
    assert reported(commands)["failures"][0].generation == 0
    assert node.statuses() == "training starting"


def test_gone_is_said_when_every_worker_has_stopped_or_died():
    node = training()
    node.die(1)
    commands = node.see(world(phase="over", reason="why", ending="failure"))
    assert told(commands) == [(0, "Over")]
    assert "gone" not in reported(commands)
    assert reported(node.say(0, orders.Stopped(0, 7)))["gone"] == 0
    assert node.statuses() == "standing starting"


def test_gone_is_said_at_once_where_nobody_trains():
    node = training()
    node.die(0)
    node.die(1)
    assert reported(node.see(world(phase="over", ending="failure")))["gone"] == 0


def test_a_death_while_stopping_counts_as_stopped():
    node = training()
    node.see(world(phase="over", ending="failure"))
    node.say(0, orders.Stopped(0, 7))
    assert reported(node.die(1))["gone"] == 0


def test_a_world_that_counts_on_a_dead_worker_is_told_what_it_died_of():
    node = training()
    node.die(1, message="killed by SIGKILL: out of memory")
    *_, told = reported(node.see(world(1)))["failures"]
    assert (told.generation, told.rank, told.local_rank) == (1, 1, 1)
    assert told.message == "killed by SIGKILL: out of memory"


def test_a_world_that_counts_on_a_replacement_which_did_not_live_is_told_no_more():
    node = training()
    node.die(1, message="killed by SIGKILL: out of memory")
    node.die(1, generation=-1, message="killed by SIGSEGV")
    *_, told = reported(node.see(world(1)))["failures"]
    assert (told.generation, told.rank, told.local_rank) == (1, 1, 1)
    assert told.message.startswith("lost a peer: ")


def test_a_stop_of_an_older_generation_means_nothing():
    node = training(3)
    node.see(world(3, phase="over", ending="failure"))
    assert node.say(0, orders.Stopped(2, 7)) == []


def test_the_largest_step_is_the_nodes_answer():
    node = training()
    assert told(node.see(world(phase="pausing", ending="resize"))) == [(0, "Ask"), (1, "Ask")]
    assert node.say(0, orders.Entered(0, 8)) == []
    answer = reported(node.say(1, orders.Entered(0, 7)))
    assert (answer["paused"], answer["entered"]) == (0, 8)


def test_a_death_does_not_leave_the_question_unanswered():
    node = training()
    node.see(world(phase="pausing", ending="resize"))
    node.say(0, orders.Entered(0, 8))
    assert reported(node.die(1))["paused"] == 0


def test_the_next_world_is_entered_after_the_agreed_step():
    node = training()
    commands = node.see(world(1, after=8))
    assert [command.order.after for command in commands] == [8, 8]
    assert node.say(0, orders.Stopped(0, 9)) == []  # on its way into the next world
    assert node.statuses() == "training training"


def test_who_is_not_in_the_next_world_stops_at_the_agreed_step():
    node = training()
    commands = node.see(world(1, me=(0,), after=8))
    assert told(commands) == [(0, "Enter"), (1, "Through")]
    node.say(1, orders.Stopped(0, 9))
    assert node.statuses() == "training standing"


def test_a_world_that_counts_on_a_dead_worker_is_told_so():
    node = training()
    node.see(world(phase="over", ending="resize"))
    node.say(0, orders.Stopped(0, 7))
    node.say(1, orders.Stopped(0, 7))
    node.die(1)
    commands = node.see(world(1))
    assert told(commands) == [(0, "Enter")]
    failures = reported(commands)["failures"]
    assert (failures[-1].generation, failures[-1].local_rank) == (1, 1)


def test_the_end_of_the_data_is_reported_and_ends_with_the_scripts():
    node = training()
    assert reported(node.say(1, orders.Finished(0, 12)))["finished"] == 0
    commands = node.see(world(phase="over", ending="finished", after=11))
    assert [(c.order.finished, c.order.through) for c in commands] == [(True, 11), (True, 11)]
    for rank in (0, 1):
        assert "gone" not in reported(node.say(rank, orders.Stopped(0, 12)))
    assert node.statuses() == "finished finished"
    assert node.feed(WorkerSucceeded(0, 0)) == []
    assert reported(node.feed(WorkerSucceeded(0, 1)))["done"] == 0


def test_a_worker_that_ends_well_before_the_training_does_has_failed():
    node = training()
    commands = node.feed(WorkerSucceeded(0, 1))
    assert "before the training was done" in reported(commands)["failures"][0].message
    assert Spawn(1) in commands


def test_a_failure_after_the_training_is_reported_and_nobody_replaced():
    node = training()
    node.see(world(phase="over", ending="finished", after=11))
    node.say(0, orders.Stopped(0, 12))
    commands = node.die(0, exitcode=1)
    assert reported(commands)["failures"]
    assert Spawn(0) not in commands


def test_an_error_of_a_living_worker_is_reported_and_it_lives_on():
    node = training()
    assert reported(node.die(0, alive=True))["failures"]
    assert node.statuses() == "training training"


def test_workers_that_die_before_they_train_are_not_started_for_ever():
    node = training()
    commands = node.die(1)
    starts = 0
    while Spawn(1) in commands:
        starts += 1
        commands = node.die(1, generation=-1)
    assert starts == crew.MOST_TRIES
    assert node.statuses() == "training gone"


def test_a_node_of_many_leaves_when_none_of_its_workers_can_start():
    node = training()
    for rank in (0, 1):
        commands = node.die(rank)
        while Spawn(rank) in commands:
            commands = node.die(rank, generation=-1)
    assert reported(commands)["leaving"].startswith("its workers cannot train: ")
    assert Stop(9) in commands


def test_nobody_takes_the_place_of_one_that_does_not_fit_unless_the_others_wait_for_it():
    node = training()
    node.say(1, orders.Unfit())
    assert Spawn(1) not in node.die(1)
    assert node.statuses() == "training gone"
    assert Spawn(1) in node.see(world(phase="waiting"))


def test_one_that_is_started_again_after_it_did_not_fit_has_one_try_until_it_stands():
    """It is waited for, and may have been given the right model meanwhile."""
    node = training()
    node.say(1, orders.Unfit())
    node.die(1)
    node.see(world(phase="waiting"))
    assert Spawn(1) not in node.die(1, generation=-1)
    node.see(world(phase="waiting"))
    node.say(1, orders.Enlisted())
    assert node.statuses() == "training standing"
    assert Spawn(1) in node.die(1, generation=-1)


def test_nobody_is_started_for_one_that_does_not_fit_on_a_node_that_leaves():
    node = training()
    node.feed(LeaveRequested(15))
    node.say(1, orders.Unfit())
    assert Spawn(1) not in node.die(1)


def test_what_one_that_does_not_fit_has_said_is_the_failure_that_is_reported():
    node = training()
    assert node.say(1, orders.Unfit()) == []
    (told,) = reported(node.die(1, message="UnfitError: another model", exitcode=1))["failures"]
    assert told.message == "UnfitError: another model"
    assert not told.fatal


def test_a_job_of_one_node_ends_when_none_of_its_workers_fits():
    """Of whom else could the freshest state be? Of workers that are gone by now."""
    node = training()
    alone = world()
    node.see(replace(alone, phase="over", ending="failure").with_nodes(alone.nodes[:1]))
    for rank in (0, 1):
        node.say(rank, orders.Unfit())
        commands = node.die(rank)
    assert reported(commands)["failures"][-1].fatal
    assert Stop(9) not in commands


def test_a_node_of_many_leaves_when_none_of_its_workers_fits():
    node = training()
    for rank in (0, 1):
        node.say(rank, orders.Unfit())
        commands = node.die(rank)
    assert reported(commands)["leaving"].startswith("its workers cannot train: ")
    assert Stop(9) in commands


def test_a_leave_waits_for_the_boundary_then_sends_the_workers_home():
    node = training()
    commands = node.feed(LeaveRequested(15, 99.0))
    assert reported(commands)["leaving"] == "SIGTERM"
    assert not told(commands)
    node.see(world(phase="pausing", ending="leave"))
    commands = node.see(world(1, me=(), after=8))
    assert told(commands) == [(0, "Through"), (1, "Through")]
    node.say(0, orders.Stopped(0, 9))
    commands = node.say(1, orders.Stopped(0, 9))
    leave = orders.Leave(15, 99.0)
    assert [one for one in commands if isinstance(one, Tell)] == [Tell(0, leave), Tell(1, leave)]
    assert commands[-1] == Stop(0)
    node.feed(WorkersGone())
    assert (node.state.is_terminal, node.state.exitcode) == (True, 143)


def test_a_leave_while_nobody_trains_is_immediate():
    group = GroupState(node="a", nproc=1, world=world(me=()))
    node = Node(crew.take_over(group, "a")[0])
    commands = node.feed(LeaveRequested(15))
    assert commands[-1] == Stop(15)


@pytest.mark.parametrize("event", [LeaveOverdue(), LeaveRequested(2)])
def test_a_leave_that_takes_too_long_or_a_second_interrupt_kills(event):
    node = training()
    node.feed(LeaveRequested(2))
    assert node.feed(event) == [Stop(9)]


def test_nobody_is_replaced_on_a_node_that_leaves():
    node = training()
    node.feed(LeaveRequested(15))
    assert Spawn(1) not in node.die(1)


def test_a_lost_lease_stops_the_workers_which_keep_their_memory():
    node = training()
    assert told(node.feed(LeaseLost())) == [(0, "Over"), (1, "Over")]
    assert node.say(0, orders.Stopped(0, 7)) == []
    commands = node.say(1, orders.Stopped(0, 7))
    assert commands[0] == Rejoin(0)
    assert reported(commands)["standing"] == (0, 1)
    assert told(node.see(world(5))) == [(0, "Enter"), (1, "Enter")]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (WorldSeen(world(phase="closed", exitcode=1)), 1),
        (WorldSeen(world(phase="closed", exitcode=0)), 0),
        (StoreLost("gone"), 171),
    ],
)
def test_the_end_of_the_job_stops_everything(event, code):
    node = training()
    assert node.feed(event) == [Stop(15)]
    assert node.feed(Said(0, orders.Stopped(0, 1))) == []
    node.feed(WorkersGone())
    assert (node.state.is_terminal, node.state.exitcode) == (True, code)


def test_data_that_ends_in_the_last_step_before_a_world_ends_that_one_too():
    node = training()
    node.see(world(1, after=8))
    assert reported(node.say(0, orders.Finished(0, 8)))["finished"] == 1


def test_what_a_worker_told_before_the_next_world_was_seen_is_said_again_of_that():
    node = training()
    node.say(0, orders.Finished(0, 8))
    node.die(1, alive=True)
    said = reported(node.see(world(1, after=8)))
    assert (said["finished"], said["finished_after"]) == (1, 8)
    assert said["failures"][-1].generation == 1


def test_through_is_revoked_when_the_world_breaks():
    node = training()
    assert told(node.see(world(phase="over", ending="leave", after=8))) == [
        *((0, "Through"), (1, "Through"))
    ]
    assert told(node.see(world(phase="over", ending="failure"))) == [(0, "Over"), (1, "Over")]


def test_a_world_seen_after_the_lease_was_lost_is_not_entered():
    node = training()
    node.feed(LeaseLost())
    assert node.see(world(1, after=8)) == []


def test_who_has_left_train_gets_the_signal():
    node = training()
    node.see(world(phase="over", ending="finished", after=11))
    for rank in (0, 1):
        node.say(rank, orders.Stopped(0, 12))
    assert node.feed(LeaveRequested(15))[-1] == Stop(15)


def test_who_dies_before_it_has_heard_that_the_training_is_done_has_not_failed():
    node = training()
    node.see(world(phase="over", ending="finished", after=11))
    node.say(0, orders.Stopped(0, 12))
    assert Spawn(1) not in node.die(1)
    assert reported(node.feed(WorkerSucceeded(0, 0)))["done"] == 0


def test_every_status_has_a_word():
    assert training().state.sentence() == "serving: workers 2 training"
    assert {status.value for status in Status} == {
        *("starting", "standing", "training", "finished", "gone")
    }
