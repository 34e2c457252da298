"""`python -m torchelastic.distributed.launch`: the defaults of torchelastic 0.2.

As in 0.2, and with `--use-env`, workers learn their local rank from LOCAL_RANK only. A script
written for `torch.distributed.launch` that wants `--local-rank=N` gets it with `--no-use-env`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchelastic.cli import run_program


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("DISTRIBUTED_LAUNCH", argv)


if __name__ == "__main__":
    sys.exit(main())
