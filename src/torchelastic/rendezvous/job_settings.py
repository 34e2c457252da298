"""Settings that all nodes of a job must share: flags, and the release they run. Pure.

The leader publishes its own in the leader key. A node that differs sees the difference, and exits;
its member record has a digest, so that no leader takes it into a world before that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchelastic import __version__
from torchelastic.config import LaunchConfig


@dataclass(frozen=True)
class Agreement:
    """The flags that every node of a job must share, and the release that reads them."""

    flags: Mapping[str, str]
    release: str = __version__

    @classmethod
    def from_config(cls, config: LaunchConfig) -> Agreement:
        """The flags that decide about worlds. Others belong to a node (`--nproc-per-node`, logs),
        or the leader's value counts (times and budgets)."""
        least, most = config.min_nodes, config.max_nodes
        return cls(
            {
                "--nnodes": str(most) if least == most else f"{least}:{most}",
                "--world-sizes": str(config.world_sizes),
                "--grow": str(config.grow),
                "--quorum": config.quorum,
                "--two-node-takeover": "yes" if config.two_node_takeover else "no",
                "--witness": config.witness or "none",
            }
        )

    def to_json(self) -> dict[str, Any]:
        return {"release": self.release, "flags": dict(self.flags)}

    @property
    def digest(self) -> str:
        """A digest that is equal on all nodes that agree."""
        text = json.dumps([series(self.release), dict(self.flags)], sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()

    def objection(self, theirs: Mapping[str, Any]) -> str:
        """Return why a node cannot join the leader's job; empty if it can."""
        release = theirs.get("release")
        if release is not None and series(str(release)) != series(self.release):
            return (
                f"This node runs torchelastic {self.release}, but the job runs {release}: only "
                "releases with the same first two numbers work together. Install the same "
                "release on every node."
            )
        flags = theirs.get("flags") or {}
        differing = [
            f"{name} ({ours} on this node, {flags[name]} in the job)"
            for name, ours in self.flags.items()
            if name in flags and flags[name] != ours
        ]
        if not differing:
            return ""
        return (
            f"This node and the job disagree about {' and '.join(differing)}: use the same value "
            "on every node."
        )


def series(release: str) -> str:
    """The releases that may be mixed in one job.

    >>> series("1.2.3.dev0")
    '1.2'
    """
    return ".".join(release.split(".")[:2])
