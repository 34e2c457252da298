"""Imported by Python while it starts: see `torchelastic.agent.spawn.startup`."""

import os
import sys
import traceback

# The directory that has the package `torchelastic` in it.
_ROOT = os.path.abspath(os.path.join(__file__, *5 * [os.pardir]))

try:
    # Last: a Python that has no torchelastic of its own borrows the agent's, and nothing else.
    sys.path.append(_ROOT)
    from torchelastic.agent.spawn import startup

    sys.path.pop()
except BaseException:
    # Going on would run the user's program in the wrong environment, perhaps in the zygote.
    traceback.print_exc()
    os._exit(1)

startup.begin()
