"""`python -m torchelastic.distributed.launch`: the defaults of torchelastic 0.2.

As in 0.2 and with `--use-env`, workers get their local rank only in LOCAL_RANK. With
`--no-use-env`, scripts also get `--local-rank=N`, as with `torch.distributed.launch`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchelastic.cli import run_program


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("DISTRIBUTED_LAUNCH", argv)


if __name__ == "__main__":
    sys.exit(main())
