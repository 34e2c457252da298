"""The last transitions of a node's state machine: printed when an event cannot be handled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

#: Transitions that are kept, and characters shown of an event or a command.
KEPT, LONGEST = 32, 160


class PhasedState(Protocol):
    """A state that can say in which phase it is."""

    def sentence(self) -> str: ...


S = TypeVar("S", bound=PhasedState)


class Transitions:
    """A ring of the last events with their phases and commands."""

    def __init__(self) -> None:
        #: Phase, event, commands; formatted only when printed.
        self._ring: deque[tuple[str, object, Sequence[object]]] = deque(maxlen=KEPT)

    def take(
        self, handle: Callable[[S, Any], tuple[S, list[Any]]], state: S, event: Any
    ) -> tuple[S, list[Any]]:
        """Let the state machine handle an event. The text of `InvalidTransition` and of failed
        assertions includes the ring."""
        try:
            after, commands = handle(state, event)
        except AssertionError as error:
            error.args = (f"{error}\n{self}",)
            raise
        self._ring.append((state.sentence(), event, commands))
        return after, commands

    def __str__(self) -> str:
        lines = [_line(*transition) for transition in self._ring]
        return "\n".join([f"The last {len(lines)} transitions, oldest first:", *lines])


def _line(phase: str, event: object, commands: Sequence[object]) -> str:
    done = ", ".join(map(_short, commands)) or "nothing"
    return f"  [{phase}] {_short(event)} -> {done}"


def _short(thing: object) -> str:
    """A world of a thousand nodes would hide all the rest."""
    text = repr(thing)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
