"""Limits on connections that are not admitted yet: in total, and from one source. Pure.

Strangers can open connections faster than they can be checked. Beyond the limits, the oldest is
dropped: a client of ours says its hello at once and does not wait.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

#: The number of entries that `Told` remembers.
REMEMBERED = 256


class AdmissionLimits(Generic[T]):
    """Connections that are not admitted yet, the oldest first."""

    def __init__(self, most: int, most_of_a_source: int) -> None:
        self.most = most
        self.most_of_a_source = most_of_a_source
        #: Visitor -> source. Dicts for their order.
        self._sources: dict[T, str] = {}
        self._visitors: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._sources))

    def __contains__(self, visitor: T) -> bool:
        return visitor in self._sources

    def enter(self, visitor: T, source: str) -> T | None:
        """Add a visitor; return one that must go for it, already removed here."""
        self._sources[visitor] = source
        of_source = self._visitors.setdefault(source, {})
        of_source[visitor] = None
        too_many = len(of_source) > self.most_of_a_source
        if not too_many and len(self._sources) <= self.most:
            return None
        oldest = next(iter(of_source if too_many else self._sources))
        self.leave(oldest)
        return oldest

    def leave(self, visitor: T) -> None:
        """Remove a visitor that is admitted or gone; nothing happens if it already was."""
        source = self._sources.pop(visitor, None)
        if source is None:
            return
        del self._visitors[source][visitor]
        if not self._visitors[source]:
            del self._visitors[source]


class Told:
    """Remembers what was logged about which source, so that it is logged once; forgets old
    sources."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()

    def first_time(self, source: str, what: str) -> bool:
        known = (source, what) in self._told
        self._told[source, what] = None
        self._told.move_to_end((source, what))
        while len(self._told) > self._most:
            self._told.popitem(last=False)
        return not known


def source_of(address: str) -> str:
    """The source that an address belongs to. With IPv6 one machine has a whole network of
    addresses.

    >>> source_of("10.0.0.1"), source_of("::ffff:10.0.0.1"), source_of("2001:db8::5:6:7:8%eth0")
    ('10.0.0.1', '10.0.0.1', '2001:db8::/64')
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, 64), strict=False))
