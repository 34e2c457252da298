"""The job's secret on its way from the agent into a worker: through a pipe, read once.

Not through the environment, which every child of the worker inherits and `/proc` shows. A Python
worker takes it before the script begins; a program of another kind may read the descriptor itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchelastic import env

if TYPE_CHECKING:
    from torchelastic.transport.auth import Secret

VARIABLE = "TORCHELASTIC_SECRET_FD"
#: More than a secret has, less than a pipe takes at once.
_MOST = 8192

_key: bytes | None = None


def offer(secret: Secret) -> int:
    """A descriptor with the secret to read, to be inherited by one worker and closed here."""
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, secret.reveal())
    finally:
        os.close(write_end)
    return read_end


def adopt() -> None:
    """Take the secret over, if the agent has handed one on, and leave no trace of the way."""
    global _key
    descriptor = env.get(VARIABLE)
    if not descriptor.isdecimal():
        return
    env.remove(VARIABLE)
    with open(int(descriptor), "rb", buffering=0) as pipe:
        _key = pipe.read(_MOST)


def secret() -> Secret | None:
    """The secret of the job this process is a worker of; None if it has none."""
    if _key is None:
        return None
    # Not before it is needed: a worker starts without it.
    from torchelastic.transport.auth import Secret

    return Secret(_key)
