"""A real S3 server (moto's), over HTTP; as a program, checkpoints at one: `s3.py ENDPOINT`."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.ports import free_port
from tests.support import poll_for
from torchelastic.checkpoint import CheckpointStore
from torchelastic.errors import CheckpointError

#: A process that writes lets all others go first: on a busy machine its imports take minutes.
PATIENCE = 600.0


@contextmanager
def s3_server(directory: Path) -> Iterator[str]:
    """Its address, while it runs."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        poll_for(lambda: answers(port), what="the S3 server", timeout=PATIENCE)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


# --- the program ---------------------------------------------------------------------------------


def state(value):
    return {"w": torch.full((1000,), float(value)), "n": value}


def saved(store, step, **options):
    assert store.save(state(step), step, **options)
    store.finish()


def steps(store):
    return [found.step for found in store.list_checkpoints()]


def check(files, writer, options):
    def open_store(**more):
        return CheckpointStore(f"s3://{writer}/job", storage_options=options, writer=writer, **more)

    files.mkdir(writer)
    store = open_store(keep_last=2)
    assert store.load() is None
    for step in (1, 2, 3):
        saved(store, step)
    assert steps(store) == [3, 2]
    fresh = open_store()
    assert torch.equal(fresh.load().tree["w"], state(3)["w"])

    # Torn: an object is gone.
    latest = files.cat_file(f"{writer}/job/latest").decode().strip()
    files.rm_file(f"{writer}/job/{latest}/__0_0.distcp")
    assert fresh.load().step == 2

    # A later world begins: the first one's writer is kept out.
    fresh.entered(1, base=2)
    saved(fresh, 4, generation=1)
    store.save(state(9), 9, generation=0)
    with pytest.raises(CheckpointError, match="void"):
        store.finish()
    assert steps(fresh)[0] == 4

    # What a killed writer left is cleared by the next one.
    files.pipe_file(f"{writer}/job/000099-step7-abcdef/__0_0.distcp", b"half")
    saved(fresh, 5, generation=1)
    assert not files.exists(f"{writer}/job/000099-step7-abcdef/__0_0.distcp")
    for one in (store, fresh):
        one.close()


if __name__ == "__main__":
    import s3fs

    options = {"key": "test", "secret": "test", "endpoint_url": sys.argv[1]}
    for writer in ("thread", "process"):
        check(s3fs.S3FileSystem(**options), writer, options)
