"""The decisions of a launcher node: when to enter a world, and when to stop. Pure.

A *launcher node* is a node whose workers another launcher starts and stops. The launcher asks for a
world when it has no workers (`next_world`), polls if it must stop them (`must_stop`), and asks for
another world when they have ended, whatever the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchelastic.errors import EXIT_NOT_ENOUGH_NODES, JobClosed, NotEnoughNodes
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World

#: The end of a launcher's part: its workers succeeded; they failed and it will not restart them; it
#: leaves, and the others may continue.
Ending = Literal["done", "failed", "left"]


@dataclass(frozen=True, kw_only=True)
class LauncherNodeState:
    """The state that the answers to the launcher depend on."""

    node: str
    #: The latest world.
    world: World | None = None
    #: The generation the launcher was given last: it may have workers of it. -1: none yet.
    held: int = -1
    #: The launcher waits for a world; no worker of `held` is left.
    asking: bool = False
    #: The lease is lost: another node may already have taken this node's place.
    given_up: bool = False

    @property
    def in_world(self) -> bool:
        """True if the generation the launcher was given still runs, with this node in it."""
        return self._phase_of_held == "running"

    @property
    def counts(self) -> bool:
        """True if this node's report about its generation still matters."""
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
    """Return True if the launcher must stop its workers."""
    return state.held >= 0 and not state.asking and not state.in_world


def next_world(state: LauncherNodeState) -> World | None:
    """Return the world to enter now; None if there is none yet. Raises if the job has ended."""
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
    """Return the fields of the member record when the launcher asks for another world.

    The failure is included only if the workers ended by themselves, not if they were stopped.
    """
    return {"gone": gone(state), "failures": (failure,) if state.in_world else ()}


def gone(state: LauncherNodeState) -> int:
    """Return the newest generation of which a launcher that asks for a world has no worker.

    A world may have ended before the launcher was given it, while this node was cut off, say.
    """
    world = state.world
    if world is None or not world.has_ended_for(state.node):
        return state.held
    return max(state.held, world.generation)


def facts_at_end(
    state: LauncherNodeState, ending: Ending, failure: Failure, why: str
) -> dict[str, Any]:
    """Return the fields of the member record when the launcher is done with the job.

    Other nodes may not be done yet: a node that succeeded has no workers for another world
    (`nproc`), since its launcher would not start any.
    """
    if ending == "done" and state.in_world:
        return {"done": state.held, "gone": state.held, "nproc": 0}
    if ending == "failed" and state.counts:
        return {"gone": state.held, "failures": (failure,), "nproc": 0}
    return {"gone": state.held, "leaving": why}
