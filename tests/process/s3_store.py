"""Checkpoints at an S3 server: `s3_store.py ENDPOINT` ends with 0 if all is right."""

from __future__ import annotations

import sys

import pytest
import s3fs
import torch

from torchelastic.checkpoint import CheckpointStore
from torchelastic.errors import CheckpointError

OPTIONS = {"key": "test", "secret": "test", "endpoint_url": sys.argv[1]}


def state(value):
    return {"w": torch.full((1000,), float(value)), "n": value}


def saved(store, step, **options):
    assert store.save(state(step), step, **options)
    store.finish()


def steps(store):
    return [found.step for found in store.list_checkpoints()]


def check(files, writer):
    def open_store(**more):
        return CheckpointStore(f"s3://{writer}/job", storage_options=OPTIONS, writer=writer, **more)

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


files = s3fs.S3FileSystem(**OPTIONS)
for writer in ("thread", "process"):
    check(files, writer)
