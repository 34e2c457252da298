"""Signals that are for the agent, in processes that help it.

They are blocked, not ignored: a worker that is forked from such a process inherits that, and a
signal that is sent to it before `unblock` must not be lost.
"""

from __future__ import annotations

import signal

#: What a scheduler may send to every process of a node.
_SENT_TO_ALL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def block() -> None:
    """Block them in a process that helps the agent: it ends with the agent, and not before."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_ALL)


def unblock() -> None:
    """Undo `block`, in a worker that is forked from such a process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT_TO_ALL)
