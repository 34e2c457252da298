"""The state machine of a node: an event in, commands out.

`script` has the table while workers end with their generation. Once all workers of the job have
called `torchelastic.train`, `in_process` has it, until the node ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torchelastic.agent.lifecycle import in_process, script
from torchelastic.agent.lifecycle.in_process import InProcessState
from torchelastic.agent.lifecycle.node_state import (
    Command,
    Event,
    Named,
    ReportMember,
    WorkerProgress,
    WorldSeen,
)
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.records import replace

#: Transitions that are kept, and characters shown of an event or a command.
KEPT, LONGEST = 32, 160

State = ScriptState | InProcessState


def handle(state: State, event: Event, seen: WorkerProgress) -> tuple[State, list[Command]]:
    """Let the table in charge handle an event. Pure."""
    commands: list[Command]
    if isinstance(event, Named):
        return replace(state, name=event.name), []
    if isinstance(state, ScriptState):
        state, commands = _while_scripts_run(state, event)
    else:
        state, commands = in_process.handle(state, event)
    return state, [_with_facts(state, command, seen) for command in commands]


def _while_scripts_run(state: ScriptState, event: Event) -> tuple[State, list[Command]]:
    state, commands = script.handle(state, event)
    if not script.is_in_process(state):
        return state, commands
    assert state.world is not None
    taken, more = in_process.take_over(state)
    taken, again = in_process.handle(taken, WorldSeen(state.world))
    return taken, [*commands, *more, *again]


def _with_facts(state: State, command: Command, seen: WorkerProgress) -> Command:
    """Add the progress of the workers to every report."""
    if not isinstance(command, ReportMember):
        return command
    facts: dict[str, Any] = {"step": seen.step, "trained": seen.trained, "holds": seen.holds}
    if state.world is not None and state.world.replica > 1:
        facts["blank"] = seen.blank
    return ReportMember({**facts, **command.changes})


class Machine:
    """The state of one node, and its last transitions: printed when an event cannot be handled."""

    def __init__(self, state: State) -> None:
        self.state = state
        #: Phase, event, commands; formatted only when printed.
        self._last: deque[tuple[str, object, Sequence[object]]] = deque(maxlen=KEPT)

    def take(self, event: Event, seen: WorkerProgress) -> list[Command]:
        """Handle an event. The text of `InvalidTransition` and of failed assertions includes the
        last transitions."""
        before = self.state.sentence()
        try:
            self.state, commands = handle(self.state, event, seen)
        except AssertionError as error:
            error.args = (f"{error}\n{self}",)
            raise
        self._last.append((before, event, commands))
        return commands

    def __str__(self) -> str:
        lines = [_line(*transition) for transition in self._last]
        return "\n".join([f"The last {len(lines)} transitions, oldest first:", *lines])


def _line(phase: str, event: object, commands: Sequence[object]) -> str:
    done = ", ".join(map(_short, commands)) or "nothing"
    return f"  [{phase}] {_short(event)} -> {done}"


def _short(thing: object) -> str:
    """A world of a thousand nodes would hide all the rest."""
    text = repr(thing)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
