"""Take what the platform says for the flags that were not given."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torchelastic.cli.options.parser import DEFAULT, PLATFORM, VARIABLE, Parsed
from torchelastic.cli.options.shape import shape_of
from torchelastic.cluster.platform import PlatformFacts
from torchelastic.config import ETCD_BACKENDS

#: Seconds of the grace time that the agent keeps for itself.
MARGIN = 2.0


@dataclasses.dataclass(frozen=True)
class TakenValues:
    """The flags with the platform's values, and the sentences for the user."""

    parsed: Parsed
    notes: tuple[str, ...] = ()


def read_file(path: str) -> str | None:
    """Return the text of a file; None if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def from_platform(parsed: Parsed, found: PlatformFacts | None) -> TakenValues:
    """Return the flags with the platform's values where nothing was given.

    A flag wins, then a PET_* variable, then the platform, each value for itself. Several nodes are
    taken only together with a place to meet; with --standalone, nothing is.
    """
    if found is None or parsed["standalone"]:
        return TakenValues(parsed)
    merged = _merge(parsed, _offered(parsed, found))
    if shape_of(merged).max_nodes == 1 and merged.strength["rdzv_endpoint"] == PLATFORM:
        merged = dataclasses.replace(
            merged,
            values={**merged.values, "rdzv_endpoint": parsed["rdzv_endpoint"]},
            strength={**merged.strength, "rdzv_endpoint": DEFAULT},
        )
    said = [_sentence(merged, found), found.advice]
    return TakenValues(merged, tuple(filter(None, said)))


def _offered(parsed: Parsed, found: PlatformFacts) -> dict[str, Any]:
    """Return the values of flags that the platform offers."""
    offered: dict[str, Any] = {}
    if found.run_id:
        offered["rdzv_id"] = found.run_id
    meets_elsewhere = parsed["rdzv_backend"] in ETCD_BACKENDS or any(
        parsed.given(dest) for dest in ("rdzv_endpoint", "master_addr", "master_port")
    )
    if found.endpoints and not meets_elsewhere:
        offered["rdzv_endpoint"] = ",".join(found.endpoints)
    if found.max_nodes is not None and (meets_elsewhere or found.endpoints):
        offered["nnodes"] = (found.min_nodes or found.max_nodes, found.max_nodes)
    more = [name for name in found.leave_signals if name not in parsed["signals_to_handle"]]
    if more:
        offered["signals_to_handle"] = (*parsed["signals_to_handle"], *more)
    if found.grace is not None:
        offered["shutdown_timeout"] = max(1.0, found.grace - MARGIN)
    return offered


def _merge(parsed: Parsed, offered: dict[str, Any]) -> Parsed:
    taken = {dest: value for dest, value in offered.items() if not parsed.given(dest)}
    return dataclasses.replace(
        parsed,
        values={**parsed.values, **taken},
        strength={**parsed.strength, **dict.fromkeys(taken, PLATFORM)},
    )


def _sentence(parsed: Parsed, found: PlatformFacts) -> str:
    """Return what was found and where; what a flag overrides is left out."""
    shape = shape_of(parsed)
    values = {
        "nnodes": ("max_nodes", f"nodes {shape.min_nodes}:{shape.max_nodes}"),
        "rdzv_endpoint": ("endpoints", f"endpoint {parsed['rdzv_endpoint']}"),
        "rdzv_id": ("run_id", f"run id {parsed['rdzv_id']}"),
    }
    said = [
        f"{text} ({found.sources[field]})"
        for dest, (field, text) in values.items()
        if field in found.sources and _is_of_platform(parsed, dest, found.sources[field])
    ]
    if found.leave_signals:
        grace = "" if found.grace is None else f" with {found.grace:g} s"
        said.append(f"leaves on {' or '.join(found.leave_signals)}{grace}")
    name = f"{found.platform} {found.job}".rstrip()
    return f"{name}: {', '.join(said)}." if said else ""


def _is_of_platform(parsed: Parsed, dest: str, source: str) -> bool:
    """Return whether a flag has its value from the platform, PET_* variables included."""
    strength = parsed.strength[dest]
    return strength == PLATFORM or (strength == VARIABLE and source.startswith("PET_"))
