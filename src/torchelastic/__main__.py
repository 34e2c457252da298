"""`python -m torchelastic` is `torchelastic`."""

from __future__ import annotations

import sys

from torchelastic.cli import main

if __name__ == "__main__":
    sys.exit(main())
