"""`python -m torchelastic.worker CALL`: call the function pickled in file CALL."""

from __future__ import annotations

import sys

from torchelastic.worker.bootstrap import run_call

if __name__ == "__main__":
    run_call(sys.argv[1])
