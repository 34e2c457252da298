"""An agent that does what a test says: the other end of a worker's channel, and a store."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from torchelastic.training import coordinator as coordinators
from torchelastic.worker import channel, orders


class FakeAgent:
    """Gives orders and hears reports; every wait has a deadline."""

    def __init__(self, end: socket.socket, store_port: int) -> None:
        self.end = end
        self._store_port = store_port
        self.heard: list[orders.Report] = []
        self.begun: list[orders.Begins] = []

    def say(self, order: orders.Order, descriptor: int | None = None) -> None:
        data = [json.dumps(orders.to_json(order)).encode()]
        socket.send_fds(self.end, data, [descriptor] if descriptor is not None else [])

    def enter(self, generation: int, *, rank: int = 0, size: int = 1, after: Any = None) -> None:
        self.say(
            orders.Enter(
                generation=generation,
                rank=rank,
                size=size,
                store=f"127.0.0.1:{self._store_port}",
                local_rank=rank,
                local_size=size,
                node_rank=0,
                nodes=1,
                after=after,
            )
        )

    def hear(self, kind: type, timeout: float = 30.0) -> Any:
        """The next report, which must be of this kind; where it begins is noted beside."""
        readable, _, _ = select.select([self.end], [], [], timeout)
        assert readable, f"no {kind.__name__} within {timeout} s after {self.heard}"
        data = self.end.recv(channel.LIMIT)
        assert data, f"the worker has closed its end, after {self.heard}"
        report = orders.from_json(json.loads(data))
        if isinstance(report, orders.Begins):
            self.begun.append(report)
            return self.hear(kind, timeout)
        self.heard.append(report)
        assert type(report) is kind, f"{kind.__name__} expected: {self.heard}"
        return report

    def up(self) -> tuple[int, int]:
        """The worker trains: in which generation, and after how many steps."""
        report = self.hear(orders.Up)
        assert report.built > 0
        assert report.fetched > 0
        return report.generation, report.step


@contextmanager
def store() -> Iterator[int]:
    """A store's port."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield host.port
    del host


class Coordinator(coordinators.CoordinatorP2P):
    """A coordinator whose agent is the test."""

    def __init__(self, end: socket.socket, **arguments: Any) -> None:
        self._end = end
        super().__init__(init_method="tcp://nowhere/test?min_workers=1", **arguments)

    def open(self) -> channel.WorkerLink:
        return channel.WorkerLink(self._end)
