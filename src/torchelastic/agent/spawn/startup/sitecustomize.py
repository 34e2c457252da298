"""Imported by Python while it starts: see `torchelastic.agent.spawn.startup`."""

import os
import sys
import traceback

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))

try:
    # Last: a Python that has no torchelastic of its own borrows the agent's, and nothing else.
    sys.path.append(os.path.dirname(_PACKAGE))
    from torchelastic.agent.spawn import startup

    sys.path.pop()
except BaseException:
    # Going on would run the user's program in the wrong environment, perhaps in the zygote.
    traceback.print_exc()
    os._exit(1)

startup.begin()
