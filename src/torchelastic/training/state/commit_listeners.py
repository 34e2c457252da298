"""Which parts of a state are told that a step is committed, and which know its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchelastic.data.ledger import Ledger
from torchelastic.data.progress import Progress


def recorded(stateful: Mapping[str, Any], ledger: Ledger | None) -> list[Progress]:
    """What knows which samples a step has used; nothing without a ledger."""
    found = [part for part in _told(stateful) if isinstance(part, Progress)]
    if ledger is not None and not found:
        raise TypeError(
            "A ledger needs a sampler that knows which samples a step has used: pass an "
            "ElasticSampler or an ElasticStream as sampler."
        )
    return found if ledger is not None else []


def listeners(stateful: Mapping[str, Any]) -> list[Callable[[], object]]:
    found = (getattr(part, "committed", None) for part in _told(stateful))
    return [method for method in found if callable(method)]


def _told(stateful: Mapping[str, Any]) -> list[Any]:
    """What is told of commits: the parts, and for a loader its sampler; none of them twice."""
    told = {}
    for part in stateful.values():
        known = getattr(part, "progress", None)
        one = known if isinstance(known, Progress) else part
        told[id(one)] = one
    return list(told.values())
