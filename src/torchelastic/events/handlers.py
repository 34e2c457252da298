"""Event handlers, which receive events besides the log file: `--event-log-handler NAME`.

    null, console            built in, as in torch
    a registered name        an entry point of the group `torchelastic.event_handlers`
    package.module:name      an object in a module

A handler is a `logging.Handler`, as in torch, such a class without arguments, or a function that
takes an event as a line of JSON. It runs in its own thread: a slow handler delays nothing, and a
stuck handler only loses events.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torchelastic.errors import ConfigError
from torchelastic.events.api import get_logging_handler  # noqa: F401  (0.2.2's path)

log = logging.getLogger(__name__)

#: The group of entry points under which packages register handlers.
GROUP = "torchelastic.event_handlers"
#: Events that may wait for a handler, and seconds that it gets for the rest at the end.
QUEUE_LIMIT, CLOSE_TIMEOUT = 10_000, 2.0

Handler = Callable[[str], None]


class ByLogging:
    """Adapter for a `logging.Handler`: each event is the message of a log record, as in torch."""

    def __init__(self, name: str, handler: logging.Handler) -> None:
        self._name = f"torchelastic-events-{name}"
        self._handler = handler

    def __call__(self, line: str) -> None:
        record = logging.LogRecord(self._name, logging.INFO, "", 0, line, None, None)
        self._handler.handle(record)

    def flush(self) -> None:
        self._handler.flush()


class HandlerThread:
    """Passes lines to a handler in a thread. Never blocks, never raises."""

    def __init__(self, name: str, handler: Handler, *, waiting: int = QUEUE_LIMIT) -> None:
        #: Lines lost because the handler was too slow or failed.
        self.lost = 0
        self._name = name
        self._handler = handler
        self._lines: queue.Queue[str | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._run, name="torchelastic-events", daemon=True)
        self._thread.start()

    def __call__(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lose("is stuck or too slow")

    def close(self, patience: float = CLOSE_TIMEOUT) -> None:
        """Let the handler take what is left, for at most `patience` seconds."""
        try:
            self._lines.put(None, timeout=patience)
        except queue.Full:
            return  # it is stuck, which was logged
        self._thread.join(patience)
        if self._thread.is_alive() or not self._lines.empty():
            self._lose("did not take the last events: it is stuck, too slow, or has ended")

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._try(partial(self._handler, line))
        if isinstance(self._handler, ByLogging):
            self._try(self._handler.flush)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # foreign code must not end the agent
            self._lose(f"failed: {error!r}")

    def _lose(self, why: str) -> None:
        self.lost += 1
        if self.lost == 1:
            log.warning("Events are lost: --event-log-handler %s %s.", self._name, why)


def sink_for(name: str) -> HandlerThread | None:
    """Return the sink for a handler's name; None: no handler. Raises `ConfigError` if unknown."""
    if name in ("null", "dynamic_rendezvous"):  # the latter is torch's other name for null
        return None
    return HandlerThread(name, _to_stderr if name == "console" else _as_handler(name, _find(name)))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _find(name: str) -> Any:
    """Load what is registered under a name, or is at `package.module:name`."""
    # Imported here: most jobs need none of it.
    from importlib.metadata import EntryPoint, entry_points

    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in found:
        entry = found[name]
    elif ":" in name:
        entry = EntryPoint(name=name, value=name, group=GROUP)
    else:
        known = ", ".join(["null", "console", *sorted(found)])
        raise ConfigError(
            f"--event-log-handler does not know '{name}': use one of {known}, or "
            "PACKAGE.MODULE:NAME for a custom handler."
        )
    try:
        return entry.load()
    except Exception as error:  # an import runs anything
        raise ConfigError(
            f"--event-log-handler {name} cannot be imported ({error!r}): correct the name, or add "
            "the module's directory to PYTHONPATH."
        ) from error


def _as_handler(name: str, found: Any) -> Handler:
    if isinstance(found, type) and issubclass(found, logging.Handler):
        found = found()
    if isinstance(found, logging.Handler):
        return ByLogging(name, found)
    if callable(found) and not isinstance(found, type):
        handler: Handler = found
        return handler
    raise ConfigError(
        f"--event-log-handler {name} is {found!r}, which cannot handle events: use a "
        "logging.Handler or a function that takes one line."
    )
