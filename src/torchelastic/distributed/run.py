"""`python -m torchelastic.distributed.run`: torchrun's flags with torchrun's defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchelastic.cli import run
from torchelastic.cli.flavours import DISTRIBUTED_RUN


def main(argv: Sequence[str] | None = None) -> int:
    return run.main(sys.argv[1:] if argv is None else argv, DISTRIBUTED_RUN)


if __name__ == "__main__":
    sys.exit(main())
