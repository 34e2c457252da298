"""`python -m torchelastic` is `torchelastic`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from torchelastic.cli import main

        exitcode = main()
    except KeyboardInterrupt:  # so early that there is nothing to end
        exitcode = 130
    sys.exit(exitcode)
