"""`torchelastic` whose agents and readers wait longer for stacks and answers than for a user.

    python patient.py run ...

On a busy machine a worker may not get a processor for a second; a test of what is found must not
depend on that.
"""

from __future__ import annotations

import sys

from torchelastic.agent.watch import hang_watchdog, inspector, query_socket, stack_reader
from torchelastic.cli import main

stack_reader.ANSWER = stack_reader.WRITTEN = hang_watchdog.ANSWER = 30.0
inspector.HERE = inspector.THERE = query_socket.PATIENCE = 90.0

if __name__ == "__main__":
    sys.exit(main())
