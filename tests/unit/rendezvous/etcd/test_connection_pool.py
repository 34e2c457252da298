"""How long etcd is waited for, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import SimpleNamespace

from tests.unit.rendezvous.embedded_support import story
from torchelastic.clock import FakeClock
from torchelastic.rendezvous.etcd import connection_pool


@story
async def test_etcd_out_of_reach_is_reported_every_minute(monkeypatch, caplog):
    monkeypatch.setattr(connection_pool, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(connection_pool, "LONGEST_PAUSE", 0.0)
    etcd = SimpleNamespace(
        addresses=["etcd1:2379"],
        check=lambda: None,
        lost=asyncio.get_running_loop().create_future(),
        has_tls=False,
    )
    clock = FakeClock()
    patience = connection_pool.RetryLimit(etcd, 3600.0, clock, first=True)
    with caplog.at_level(logging.WARNING, logger=connection_pool.log.name):
        for trouble in (socket.gaierror(), *[ConnectionRefusedError()] * 3):
            await patience.wait(trouble)
            clock.advance(connection_pool.REPEAT_INTERVAL / 2)
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert said == ["host name not known", "connection refused"]
