"""Print the torch that a worker would import, as JSON; run with a worker's environment.

It tries gloo as well: even a group of one looks up the interface and the name of this machine.
"""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import timedelta
from typing import Any


def look() -> dict[str, Any]:
    """Return everything that can be found out without touching a GPU."""
    began = time.monotonic()
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "place": torch.__file__,
        "seconds": time.monotonic() - began,
        "built_for": _built_for(torch.version.cuda, torch.version.hip),
        "nccl": "",
        "gloo": "torch was built without it",
    }
    if dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if dist.is_gloo_available():
        found["gloo"] = try_gloo()
    return found


def _built_for(cuda: str | None, rocm: str | None) -> str:
    """Return `CUDA 13.0` or the like; empty: CPU only."""
    return f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else ""


def try_gloo() -> str:
    """Return why a group of one cannot be created; empty if it can."""
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            store=dist.HashStore(),  # type: ignore[attr-defined]  # public all the same
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=10),
        )
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    except RuntimeError as error:
        return in_words(str(error))
    return ""


def in_words(text: str) -> str:
    """Return the first line of an error, without the location in gloo's source.

    >>> in_words("[enforce fail at /g/device.cc:84] ifa != nullptr. Unable to find eth7")
    'Unable to find eth7'
    """
    line = (text.strip() or "no reason").splitlines()[0]
    return re.sub(r"^\[enforce fail at [^\]]*\] .*?\. ", "", line)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look()) + "\n")
