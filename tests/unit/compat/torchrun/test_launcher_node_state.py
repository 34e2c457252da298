"""The answers to a launcher, by what its node knows."""

from dataclasses import replace

import pytest

from torchelastic.compat.torchrun import launcher_node_state
from torchelastic.compat.torchrun.launcher_node_state import LauncherNodeState
from torchelastic.errors import EXIT_NOT_ENOUGH_NODES, JobClosed, NotEnoughNodes
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World, WorldNode

FAILURE = Failure(
    generation=3, node="n", rank=0, local_rank=0, pid=1, exitcode=1, message="ended", fatal=True
)


def world(phase="running", generation=3, nodes=("me",), **more):
    placed = [
        WorldNode(node, node, "h", rank, 1, "default", rank, rank, local_ranks=(0,))
        for rank, node in enumerate(nodes)
    ]
    return World(generation=generation, phase=phase, **more).with_nodes(placed)


def launcher_node(held=3, **known):
    return LauncherNodeState(node="me", held=held, **{"world": world(), **known})


def test_workers_are_to_be_stopped_when_their_world_does_not_run():
    for case, state, stop in (
        ("nothing was started", launcher_node(held=-1, world=None), False),
        ("in the world that runs", launcher_node(), False),
        ("over", launcher_node(world=world("over")), True),
        ("too few are left", launcher_node(world=world("waiting")), True),
        ("closed", launcher_node(world=world("closed")), True),
        ("a later world runs", launcher_node(world=world(generation=4)), True),
        ("given up", launcher_node(given_up=True), True),
        ("stopped already", launcher_node(world=world("over"), asking=True), False),
    ):
        assert launcher_node_state.must_stop(state) is stop, case


def test_a_world_is_entered_once_and_only_with_a_place_in_it():
    for case, state, generation in (
        ("none yet", launcher_node(held=-1, world=None), None),
        ("the first", launcher_node(held=-1), 3),
        ("never the same twice", launcher_node(), None),
        ("the next", launcher_node(world=world(generation=4)), 4),
        ("a spare waits", launcher_node(world=world(generation=4, nodes=("x",))), None),
        ("over already", launcher_node(world=world("over", generation=4)), None),
        ("given up", launcher_node(world=world(generation=4), given_up=True), None),
    ):
        found = launcher_node_state.next_world(state)
        assert (found and found.generation) == generation, case


def test_asking_after_the_end_gets_the_reason():
    ends = {0: JobClosed, 1: JobClosed, EXIT_NOT_ENOUGH_NODES: NotEnoughNodes}
    for exitcode, error in ends.items():
        closed = world("closed", reason="it is done", exitcode=exitcode)
        with pytest.raises(error, match="it is done"):
            launcher_node_state.next_world(launcher_node(world=closed))


def test_workers_that_ended_by_themselves_are_explained_and_those_that_were_stopped_not():
    assert launcher_node_state.facts_when_asking(launcher_node(), FAILURE) == {
        "gone": 3,
        "failures": (FAILURE,),
    }
    stopped = launcher_node(world=world("over"))
    assert launcher_node_state.facts_when_asking(stopped, FAILURE) == {"gone": 3, "failures": ()}


def test_a_launcher_that_asks_has_no_worker_of_a_world_that_ended_before_it_was_given():
    ahead = {"generation": 5}
    for case, state, gone in (
        ("over", launcher_node(asking=True, world=world("over", **ahead)), 5),
        ("waiting", launcher_node(asking=True, world=world("waiting", **ahead)), 5),
        (
            "no place in it",
            launcher_node(asking=True, world=world("waiting", nodes=("x",), **ahead)),
            3,
        ),
        ("it is about to be given", launcher_node(asking=True, world=world(**ahead)), 3),
        ("the first, empty one", launcher_node(held=-1, world=world("waiting", 0, nodes=())), -1),
    ):
        assert launcher_node_state.gone(state) == gone, case


@pytest.mark.parametrize(
    ("ending", "known", "facts"),
    [
        ("done", {}, {"done": 3, "gone": 3, "nproc": 0}),
        ("done", {"world": world("over")}, {"gone": 3, "leaving": "why"}),
        ("failed", {}, {"gone": 3, "failures": (FAILURE,), "nproc": 0}),
        # Others may have reported what followed from it before.
        ("failed", {"world": world("over")}, {"gone": 3, "failures": (FAILURE,), "nproc": 0}),
        ("failed", {"world": world("waiting")}, {"gone": 3, "leaving": "why"}),
        ("failed", {"given_up": True}, {"gone": 3, "leaving": "why"}),
        ("left", {}, {"gone": 3, "leaving": "why"}),
    ],
)
def test_the_message_at_the_end(ending, known, facts):
    assert (
        launcher_node_state.facts_at_end(replace(launcher_node(), **known), ending, FAILURE, "why")
        == facts
    )
