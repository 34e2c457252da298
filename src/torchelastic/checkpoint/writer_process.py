"""A process that writes checkpoints, so that the training process does not have to.

Serialising a state and computing checksums would take the GIL and a core from the training. The
state is not sent: the process maps the memory it was copied to (`staging`). It is a plain child,
`python -m torchelastic.checkpoint.writer_process`, started with the first large
checkpoint; it ends when its parent does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from torchelastic import faults
from torchelastic.checkpoint.catalog import Catalog
from torchelastic.checkpoint.save_job import Job, Written, run
from torchelastic.checkpoint.staging import staged
from torchelastic.checkpoint.storage import safe_pickle
from torchelastic.checkpoint.storage.storage import open_storage
from torchelastic.errors import CheckpointError

_LENGTH = struct.Struct("!Q")
#: The training gets the larger share of a core.
_NICENESS = 10


class WriterProcess:
    """The parent's side. Used by one thread."""

    def __init__(self, url: str, options: Mapping[str, Any], retention: Mapping[str, Any]) -> None:
        self._about = (url, dict(options), dict(retention))
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def run(self, job: Job, descriptor: int) -> Written:
        """Run a job in the process and wait for its result."""
        if self._socket is None:
            self._start()
        assert self._socket is not None
        try:
            _send(self._socket, job, descriptor)
            answer, _ = _receive(self._socket)
        except (EOFError, OSError) as error:
            code = self._reap()
            raise CheckpointError(
                f"the checkpoint writer process died (exit code {code})"
            ) from error
        if isinstance(answer, Written):
            return answer
        raise CheckpointError(str(answer))

    def close(self) -> None:
        if self._socket is not None:
            self._reap()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        _send(ours, self._about)

    def _reap(self) -> int | None:
        if self._socket is not None:
            self._socket.close()
        process, self._process, self._socket = self._process, None, None
        return process.wait() if process is not None else None


def _send(connection: socket.socket, message: object, descriptor: int | None = None) -> None:
    data = safe_pickle.dumps(message)
    descriptors = [] if descriptor is None else [descriptor]
    socket.send_fds(connection, [_LENGTH.pack(len(data))], descriptors)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[Any, int | None]:
    """A message from the other end; EOFError once it has gone."""
    header, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    if len(header) != _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    data = bytearray()
    while len(data) < length:
        chunk = connection.recv(min(length - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return safe_pickle.loads(data), descriptors[0] if descriptors else None


# --- the child ------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    import torch

    # The agent's signals are for the training; this process ends with its parent.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    # The marker has checksums of all files: torch's own, of each tensor, would cost as much again.
    torch.serialization.set_crc32_options(False)
    faults.load()
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    try:
        (url, options, retention), _ = _receive(connection)
        catalog = Catalog(open_storage(url, options), **retention)
        while True:
            job, memory = _receive(connection)
            if memory is not None:
                _send(connection, _answer(job, catalog, memory))
    except (EOFError, OSError):
        return  # the parent has gone


def _answer(job: Job, catalog: Catalog, memory: int) -> Written | str:
    if faults.planned:
        faults.position(rank=job.rank, step=job.step, generation=job.fence.generation)
    try:
        return run(job, catalog, staged(memory, job.slots))
    except Exception as error:  # the parent reports it to the user
        return str(error) if isinstance(error, CheckpointError) else repr(error)
    finally:
        os.close(memory)


def _end_with_parent(connection: socket.socket) -> None:
    """Exit with the parent, even during a write: an incomplete checkpoint is cleared later."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
