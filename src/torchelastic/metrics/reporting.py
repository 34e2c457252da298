"""Report metrics of a script to the worker's agent, which shows the last values with the job.

The first value creates the metric table and passes it to the agent in one message. In a process
that is not a worker, or in a child of a worker, values are not reported.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from torchelastic.errors import ChannelLost
from torchelastic.metrics.metric_table import MESSAGE, MetricTable
from torchelastic.worker import channel

#: Seconds to wait for a busy agent, once.
SEND_TIMEOUT = 1.0

_table: MetricTable | None = None
_connected = False
_connecting = threading.Lock()


def report(name: str, value: Any) -> None:
    """Report the last value of a metric to the agent."""
    if not _connected:
        _connect()
    if _table is not None:
        _table.put(name, value)


def _connect() -> None:
    global _table, _connected
    with _connecting:
        if not _connected:
            _table = _create_table()
            _connected = True


def _create_table() -> MetricTable | None:
    link = channel.link()
    if link is None:
        return None
    table = MetricTable()
    try:
        link.tell({"type": MESSAGE}, [table.descriptor], timeout=SEND_TIMEOUT)
    except ChannelLost:  # training matters more than metrics
        table.close()
        return None
    finally:
        link.close()
    return table


def _forked() -> None:
    """Reset in a child: it must not write its parent's values, and a held lock would stay held."""
    global _table, _connected, _connecting
    _table, _connected, _connecting = None, False, threading.Lock()


os.register_at_fork(after_in_child=_forked)
