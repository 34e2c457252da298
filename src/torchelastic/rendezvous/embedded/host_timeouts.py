"""Timeouts of the host: for an agent whose connection ended, and for a successor when it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.embedded.server import RECONNECT_GRACE, EmbeddedServer
from torchelastic.rendezvous.store import Json
from torchelastic.rendezvous.world import MEMBER_PREFIX, WORLD_KEY, World
from torchelastic.transport import frames
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.frames import Row
from torchelastic.transport.ring import lives


async def grace_of(
    rows: Sequence[Row], *, at: Callable[[str], Endpoint], alone: bool
) -> float | None:
    """Seconds to wait for the agent of these rows after its connection ended; None: its whole
    lease.

    0 if its machine refuses connections to its port. If it lives, if that is unknown, or if a node
    trains `alone` without its host, the lease decides.
    """
    records = [row.text for row in rows if row.key.startswith(MEMBER_PREFIX)]
    address = frames.decode_value(records[0] or "{}").get("peer") if records else None
    grace: float | None = RECONNECT_GRACE
    if address:
        grace = 0.0 if await lives(at(address)) is False else None
    return None if records and alone else grace


def newest_summary(server: EmbeddedServer | None, holding: FailoverState) -> Json:
    """The summary of the newest world; a host has it first."""
    if server is None:
        return holding.rows.get(WORLD_KEY, {})
    texts = {row.key: row.text for row in server.rows(WORLD_KEY)}
    return frames.decode_value(texts.get(WORLD_KEY) or "{}")


def trains_alone(summary: Json, parts: Iterable[Row], host: str) -> bool:
    """Return whether the last world is a single node other than its host."""
    if summary.get("count") != 1:
        return False
    found = [frames.decode_value(row.text or "{}") for row in parts]
    return World.from_parts(summary, found).steps_without(host)


def others_stay(members: Iterable[Row], host: str) -> bool:
    """Return whether any member other than the host stays."""
    records = [frames.decode_value(row.text or "{}") for row in members]
    return any(one.get("node") != host and not one.get("leaving") for one in records)
