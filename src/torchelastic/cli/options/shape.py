"""The shape of a job: how many nodes, and how many workers on each. Pure."""

from __future__ import annotations

import dataclasses

from torchelastic.cli.options.parser import Parsed
from torchelastic.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class JobShape:
    """The number of nodes, and of workers on each."""

    min_nodes: int
    max_nodes: int
    workers: int | str


def shape_of(parsed: Parsed) -> JobShape:
    """Return the shape from `-j` or the long flags; a flag wins over a variable."""
    (min_nodes, max_nodes), workers = parsed["nnodes"], parsed["nproc_per_node"]
    short = parsed.strength["shape"]
    for dest in ("nnodes", "nproc_per_node"):
        long = parsed.strength[dest]
        if short and short == long:
            raise ConfigError(
                f"-j and --{dest.replace('_', '-')} set the same thing: remove one of them."
            )
    if short > parsed.strength["nnodes"]:
        min_nodes, max_nodes, _ = parsed["shape"]
    if short > parsed.strength["nproc_per_node"]:
        workers = parsed["shape"][2]
    if parsed["standalone"]:
        if min_nodes > 1:
            raise ConfigError(
                f"--standalone is for one node, but the job needs {min_nodes}: remove it and give "
                "every node the same --rdzv-endpoint HOST:PORT."
            )
        max_nodes = 1
    return JobShape(min_nodes, max_nodes, workers)
