"""`python -m torchelastic.distributed.run`: torchrun's flags, Bagua's defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchelastic.cli import run_program


def main(argv: Sequence[str] | None = None) -> int:
    return run_program("DISTRIBUTED_RUN", argv)


if __name__ == "__main__":
    sys.exit(main())
