"""What a script reports is seen by the job: the last values go to the worker's agent.

Nothing is made before the first one: then a board, and the one message that hands it to the agent.
A process that is no worker of an agent has nobody to tell; so has a child of a worker.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from torchelastic.errors import ChannelLost
from torchelastic.metrics.metric_table import MESSAGE, MetricTable
from torchelastic.worker import channel

#: Seconds to wait for an agent that is busy. It is asked once.
PATIENCE = 1.0

_table: MetricTable | None = None
_connected = False
_connecting = threading.Lock()


def report(name: str, value: Any) -> None:
    """The last value of a metric, for everybody who shows the job."""
    if not _connected:
        _connect()
    if _table is not None:
        _table.put(name, value)


def _connect() -> None:
    global _table, _connected
    with _connecting:
        if not _connected:
            _table = _hand_over_a_board()
            _connected = True


def _hand_over_a_board() -> MetricTable | None:
    link = channel.link()
    if link is None:
        return None
    table = MetricTable()
    try:
        link.tell({"type": MESSAGE}, [table.descriptor], patience=PATIENCE)
    except ChannelLost:  # training matters more than telling
        table.close()
        return None
    finally:
        link.close()
    return table


def _forked() -> None:
    """A child must not write its parent's values; and a lock that was held would stay held here."""
    global _table, _connected, _connecting
    _table, _connected, _connecting = None, False, threading.Lock()


os.register_at_fork(after_in_child=_forked)
