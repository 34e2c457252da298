"""What a guest makes of the worlds it hears of. Pure.

A *guest* is a node whose workers another launcher starts and stops. The launcher asks for a world
when it has no workers (`next_world`), asks now and then whether it has to stop them (`must_stop`),
and asks for another world when they have ended, whatever the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchelastic.errors import EXIT_NOT_ENOUGH_NODES, JobClosed, NotEnoughNodes
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World

#: How a launcher is done with a job: its workers succeeded; they failed and it will not start them
#: again; it goes, and the others may go on.
Ending = Literal["done", "failed", "left"]


@dataclass(frozen=True, kw_only=True)
class LauncherNodeState:
    """All that decides what the launcher is told."""

    node: str
    #: The latest world.
    world: World | None = None
    #: The generation the launcher was given last: it may have workers of it. -1: none yet.
    held: int = -1
    #: The launcher waits for a world; no worker of `held` is left.
    asking: bool = False
    #: The lease is lost: somebody else may train in this node's place already.
    given_up: bool = False

    @property
    def in_world(self) -> bool:
        """Whether the generation the launcher was given still runs, with this node in it."""
        return self._phase_of_held == "running"

    @property
    def counts(self) -> bool:
        """Whether what this node says of its generation still makes a difference."""
        return self._phase_of_held in ("running", "over")

    @property
    def _phase_of_held(self) -> str:
        world = self.world
        known = world is not None and world.generation == self.held and not self.given_up
        return world.phase if world is not None and known else ""

    @property
    def is_closed(self) -> bool:
        return self.world is not None and self.world.phase == "closed"


def must_stop(state: LauncherNodeState) -> bool:
    """Whether the launcher has to stop the workers it was given a world for."""
    return state.held >= 0 and not state.asking and not state.in_world


def next_world(state: LauncherNodeState) -> World | None:
    """The world to enter now; None: there is none yet. Raises when there will be none any more."""
    world = state.world
    if world is None or state.given_up:
        return None
    if world.phase == "closed":
        raise _closed(world)
    entered = world.phase == "running" and world.generation > state.held
    return world if entered and world.place(state.node) is not None else None


def _closed(world: World) -> JobClosed | NotEnoughNodes:
    if world.exitcode == EXIT_NOT_ENOUGH_NODES:
        return NotEnoughNodes(f"The job has ended: {world.reason}.")
    return JobClosed(f"The job has ended: {world.reason}.")


def facts_when_asking(state: LauncherNodeState, failure: Failure) -> dict[str, Any]:
    """What the member record says from when the launcher asks for another world.

    Asked to stop its workers, it has nothing to explain; otherwise they ended by themselves.
    """
    return {"gone": gone(state), "failures": (failure,) if state.in_world else ()}


def gone(state: LauncherNodeState) -> int:
    """The newest generation of which a launcher that asks for a world has no worker.

    A world may have ended before the launcher was given it, while this node was cut off, say.
    """
    world = state.world
    if world is None or not world.has_ended_for(state.node):
        return state.held
    return max(state.held, world.generation)


def facts_at_end(
    state: LauncherNodeState, ending: Ending, failure: Failure, why: str
) -> dict[str, Any]:
    """What the member record says when the launcher is done with the job.

    Nobody else may be done yet: a node that succeeded has no worker for another world (`nproc`),
    since its launcher would not start any.
    """
    if ending == "done" and state.in_world:
        return {"done": state.held, "gone": state.held, "nproc": 0}
    if ending == "failed" and state.counts:
        return {"gone": state.held, "failures": (failure,), "nproc": 0}
    return {"gone": state.held, "leaving": why}
