"""Real agents with a light torch.

A zygote imports torch for its workers: three seconds of CPU time for each agent of each test. Where
no worker of a job uses torch, a package of three small files takes its place on the agent's path.
Whatever is tested about torch itself, its stores and its groups uses the real one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PLACE = Path(__file__).parent / "process" / "light_torch"


def with_light_torch(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of an agent whose workers do not use torch."""
    path = [str(PLACE), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}
