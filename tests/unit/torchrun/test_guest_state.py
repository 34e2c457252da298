"""What a launcher is told, by what its guest knows."""

from dataclasses import replace

import pytest

from torchelastic.errors import EXIT_NOT_ENOUGH_NODES, JobClosed, NotEnoughNodes
from torchelastic.failure import Failure
from torchelastic.rendezvous.world import World, WorldNode
from torchelastic.torchrun import guest_state
from torchelastic.torchrun.guest_state import GuestState

FAILURE = Failure(
    generation=3, node="n", rank=0, local_rank=0, pid=1, exitcode=1, message="ended", fatal=True
)


def world(phase="running", generation=3, nodes=("me",), **more):
    placed = [
        WorldNode(
            node=node,
            name=node,
            addr="h",
            node_rank=rank,
            nproc=1,
            role="default",
            first_rank=rank,
            first_role_rank=rank,
            local_ranks=(0,),
        )
        for rank, node in enumerate(nodes)
    ]
    return World(generation=generation, phase=phase, **more).with_nodes(placed)


def guest(held=3, **known):
    return GuestState(node="me", held=held, **{"world": world(), **known})


@pytest.mark.parametrize(
    ("state", "stop"),
    [
        pytest.param(guest(held=-1, world=None), False, id="nothing was started"),
        pytest.param(guest(), False, id="in the world that runs"),
        pytest.param(guest(world=world("over")), True, id="over"),
        pytest.param(guest(world=world("waiting")), True, id="too few are left"),
        pytest.param(guest(world=world("closed")), True, id="closed"),
        pytest.param(guest(world=world(generation=4)), True, id="a later world runs"),
        pytest.param(guest(given_up=True), True, id="given up"),
        pytest.param(guest(world=world("over"), asking=True), False, id="stopped already"),
    ],
)
def test_workers_are_to_be_stopped_when_their_world_does_not_run(state, stop):
    assert guest_state.must_stop(state) is stop


@pytest.mark.parametrize(
    ("state", "generation"),
    [
        pytest.param(guest(held=-1, world=None), None, id="none yet"),
        pytest.param(guest(held=-1), 3, id="the first"),
        pytest.param(guest(), None, id="never the same twice"),
        pytest.param(guest(world=world(generation=4)), 4, id="the next"),
        pytest.param(guest(world=world(generation=4, nodes=("x",))), None, id="a spare waits"),
        pytest.param(guest(world=world("over", generation=4)), None, id="over already"),
        pytest.param(guest(world=world(generation=4), given_up=True), None, id="given up"),
    ],
)
def test_a_world_is_entered_once_and_only_with_a_place_in_it(state, generation):
    found = guest_state.next_world(state)

    assert (found and found.generation) == generation


@pytest.mark.parametrize(
    ("exitcode", "error"), [(0, JobClosed), (1, JobClosed), (EXIT_NOT_ENOUGH_NODES, NotEnoughNodes)]
)
def test_who_asks_after_the_end_is_told_why(exitcode, error):
    closed = world("closed", reason="it is done", exitcode=exitcode)

    with pytest.raises(error, match="it is done"):
        guest_state.next_world(guest(world=closed))


def test_workers_that_ended_by_themselves_are_explained_and_those_that_were_stopped_not():
    assert guest_state.facts_when_asking(guest(), FAILURE) == {"gone": 3, "failures": (FAILURE,)}
    stopped = guest(world=world("over"))
    assert guest_state.facts_when_asking(stopped, FAILURE) == {"gone": 3, "failures": ()}


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
def test_what_is_said_at_the_end(ending, known, facts):
    assert guest_state.facts_at_end(replace(guest(), **known), ending, FAILURE, "why") == facts
