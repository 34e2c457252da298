"""Settings that all nodes of a job must share: flags, and the release they run. Pure.

The leader publishes its settings in the leader key. A node that differs notices, and exits; its
member record has a digest, so that the leader includes it in no world before that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchelastic import __version__
from torchelastic.config import LaunchConfig
from torchelastic.config.flag import flags_of

#: Flags that are left out unless they are given, so that releases without them agree.
_SENT_IF_GIVEN = ("--replica-size",)


@dataclass(frozen=True)
class JobSettings:
    """The flags that every node of a job must share, and the release that reads them."""

    flags: Mapping[str, str]
    release: str = __version__

    @classmethod
    def from_config(cls, config: LaunchConfig) -> JobSettings:
        """The flags that decide about worlds: all that are declared `shared`. Others belong to a
        node (`--nproc-per-node`, logs), or the leader's value counts (times and budgets)."""
        least, most = config.min_nodes, config.max_nodes
        flags = {"--nnodes": str(most) if least == most else f"{least}:{most}"}
        for field, flag in flags_of(LaunchConfig).items():
            if flag.shared:
                flags[flag.name] = _in_words(getattr(config, field))
        if config.replica_size:
            flags["--replica-size"] = str(config.replica_size)
            flags["--nproc-per-node"] = (
                str(config.nproc_per_node)
                if config.nodes_per_replica > 1
                else f"a multiple of {config.replica_size}"
            )
        return cls(flags)

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
        unset = dict.fromkeys(_SENT_IF_GIVEN, "not given")
        theirs, known = {**unset, **flags}, {**unset, **self.flags}
        differing = [
            f"{name} ({ours} on this node, {theirs[name]} in the job)"
            for name, ours in known.items()
            if name in theirs and theirs[name] != ours
        ]
        if not differing:
            return ""
        return (
            f"This node and the job disagree about {' and '.join(differing)}: use the same value "
            "on every node."
        )


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "none"


def series(release: str) -> str:
    """The releases that may be mixed in one job.

    >>> series("1.2.3.dev0")
    '1.2'
    """
    return ".".join(release.split(".")[:2])
