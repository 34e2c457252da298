"""`torchelastic` whose agents and readers wait longer for stacks and answers than for a user.

    python patient.py run ...

On a busy machine a worker may not get a processor for a second; a test of what is found must not
depend on that.
"""

from __future__ import annotations

import sys

from torchelastic.agent.watch import hang_watchdog, inspector, stack_reader
from torchelastic.cli import main

stack_reader.ANSWER_TIMEOUT = stack_reader.STACKS_TIMEOUT = hang_watchdog.ANSWER_TIMEOUT = 30.0
stack_reader.PY_SPY_TIMEOUT = 60.0
inspector.STACKS_TIMEOUT = inspector.AGENTS_TIMEOUT = inspector.ANSWER_TIMEOUT = 90.0

if __name__ == "__main__":
    sys.exit(main())
