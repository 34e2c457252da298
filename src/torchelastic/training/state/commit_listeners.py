"""The parts of a state that hear of commits, and those that record a step's samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchelastic.data.ledger import Ledger
from torchelastic.data.progress import Progress


def recorded(stateful: Mapping[str, Any], ledger: Ledger | None) -> list[Progress]:
    """Return the parts that record the samples of a step; none without a ledger."""
    found = [part for part in _told(stateful) if isinstance(part, Progress)]
    if ledger is not None and not found:
        raise TypeError(
            "A ledger needs a sampler that records the samples of each step: pass an "
            "ElasticSampler or an ElasticStream as sampler."
        )
    return found if ledger is not None else []


def listeners(stateful: Mapping[str, Any]) -> list[Callable[[], object]]:
    found = (getattr(part, "committed", None) for part in _told(stateful))
    return [method for method in found if callable(method)]


def _told(stateful: Mapping[str, Any]) -> list[Any]:
    """Return the objects to notify of commits: parts, and a loader's sampler; each once."""
    told = {}
    for part in stateful.values():
        known = getattr(part, "progress", None)
        one = known if isinstance(known, Progress) else part
        told[id(one)] = one
    return list(told.values())
