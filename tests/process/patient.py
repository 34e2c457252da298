"""`torchelastic` whose agents and readers wait longer for stacks and answers than for a user.

    python patient.py run ...

On a busy machine a worker may not get a processor for a second; a test of what is found must not
depend on that.
"""

from __future__ import annotations

import sys

from torchelastic.agent import doings, inquiry, stacks, vigil
from torchelastic.cli import main

stacks.ANSWER = stacks.WRITTEN = vigil.ANSWER = 30.0
doings.HERE = doings.THERE = inquiry.PATIENCE = 90.0

if __name__ == "__main__":
    sys.exit(main())
