"""The job's secret on its way from the agent into a worker: through a pipe, read once.

The environment would expose it to every child of the worker and in `/proc`. A Python worker takes
it before the script begins; any other program may read the descriptor itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchelastic import env

if TYPE_CHECKING:
    from torchelastic.transport.auth import Secret

VARIABLE = "TORCHELASTIC_SECRET_FD"
#: More bytes than a secret has, fewer than a pipe takes at once.
_MOST = 8192

_key: bytes | None = None


def offer(secret: Secret) -> int:
    """Return a pipe with the secret, for one worker to inherit; the caller closes it."""
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, secret.reveal())
    finally:
        os.close(write_end)
    return read_end


def adopt() -> None:
    """Read the secret, if the agent passed one, and remove the variable."""
    global _key
    descriptor = env.get(VARIABLE)
    if not descriptor.isdecimal():
        return
    env.remove(VARIABLE)
    with open(int(descriptor), "rb", buffering=0) as pipe:
        _key = pipe.read(_MOST)


def secret() -> Secret | None:
    """Return the secret of this worker's job; None if it has none."""
    if _key is None:
        return None
    # Not before it is needed: a worker starts without it.
    from torchelastic.transport.auth import Secret

    return Secret(_key)
