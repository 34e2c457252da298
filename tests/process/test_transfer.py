"""State sent from those who have it to those who lack it, between real processes."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.process import forked
from tests.process.forked import build
from torchelastic.errors import TransferError
from torchelastic.tensors import tensor_tree, transfer
from torchelastic.training.group.group import Group

# --- one rank of a world in which some have a state and others lack it ---------------------------


def state(value: int) -> dict[str, Any]:
    """Tensors of many kinds."""
    generator = torch.Generator().manual_seed(value)
    large = torch.rand(5000, generator=generator)
    return {
        "large": large,
        "same": large,
        "small": [torch.full((n,), value, dtype=torch.bfloat16) for n in range(40)],
        "image": torch.rand(2, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last),
        "gaps": torch.rand(40, 40, generator=generator)[::2, ::2],
        "scalar": torch.tensor(value == 1),
        "empty": torch.empty(0, 3),
        "array": numpy.arange(value, value + 500, dtype=">i4"),
        "nothing": (value, None, {3: 0.5}),
    }


def digest(tree: Any) -> tuple[str, list[bytes]]:
    skeleton, tensors = tensor_tree.flatten(tree)
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors)
    return skeleton, [one.numpy().tobytes() for one in flat]


def session(rank: int, size: int) -> Any:
    """With limits on messages so low that the state is sent in every way there is."""
    transfer.SMALL, transfer.LARGEST = 256, 4096
    return SimpleNamespace(rank=rank, size=size, received=0)


def exchange(rank: int, port: int, size: int, holders: Sequence[int]) -> Any:
    """The state that this rank gets, and how many bytes came."""
    build(port, rank, size)
    world = session(rank, size)
    tree = transfer.share(world, state(1) if rank in holders else None, holders=holders)
    dist.barrier()
    return None if tree is None else (digest(tree), world.received)


def in_place(rank: int, port: int) -> Any:
    """Which tensors of its own the rank that lacks a state has got it in."""
    build(port, rank, 2)
    if rank == 0:
        transfer.share(session(0, 2), state(1), holders=[0])
        dist.barrier()
        return None
    own = state(2)
    own["large"] = own["large"][:-1]  # does not fit
    before = dict(tensor_tree.tensors_by_path(own))
    tree = transfer.share(session(1, 2), None, holders=[0], into=own)
    dist.barrier()
    after = dict(tensor_tree.tensors_by_path(tree))
    kept = [p for p, x in after.items() if x.numel() and x.data_ptr() == before[p].data_ptr()]
    return digest(tree), kept


def bereaved(rank: int, port: int) -> Any:
    """The second holder dies when it has sent some of its messages."""
    group = build(port, rank, 3)
    if rank == 1:
        group.before_collective = lambda: _die(group)
    try:
        transfer.share(session(rank, 3), state(1) if rank < 2 else None, holders=[0, 1])
    except RuntimeError as error:
        group.abort("a holder is lost")  # or the other holder would wait to be received from
        return type(error).__name__
    return "whole"


def _die(group: Group) -> None:
    if group.launched >= 2:
        os.kill(os.getpid(), signal.SIGKILL)


def misled(rank: int, port: int, header: list[int], text: bytes) -> Any:
    """The error of a rank that receives an invalid state."""
    build(port, rank, 2)
    if rank == 0:
        # Not waited for: it may be refused before it is read.
        dist.isend(torch.tensor(header), 1)
        dist.isend(torch.frombuffer(bytearray(text), dtype=torch.uint8), 1)
        return None
    try:
        return transfer.share(session(1, 2), None, holders=[0])
    except TransferError as error:
        return str(error)


# --- the tests -----------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("forks")


@given(st.lists(st.integers(0, 3 * transfer.LARGEST), max_size=30), st.integers(1, 5))
def test_every_byte_is_sent_once(sizes, holders):
    at = [0] * len(sizes)
    for holder in range(holders):
        sent = 0
        for message in transfer.messages(sizes, holder, holders):
            lengths = [span.end - span.begin for span in message]
            assert 0 < sum(lengths) <= transfer.LARGEST
            assert len(message) == 1 or max(lengths) < transfer.SMALL
            sent += sum(lengths)
        assert abs(sent - sum(sizes) / holders) <= 1
    for holder in range(holders):
        spans = [span for message in transfer.messages(sizes, holder, holders) for span in message]
        for span in sorted(spans, key=lambda span: (span.tensor, span.begin)):
            assert span.begin == at[span.tensor]
            at[span.tensor] = span.end
    assert at == sizes


def test_small_tensors_share_messages():
    sizes = [1000] * 1000
    assert len(list(transfer.messages(sizes, 0, 1))) == 4


@pytest.mark.parametrize(
    ("size", "holders"), [(2, [1]), (4, [0, 1, 2]), (4, [2]), (4, [0, 3])], ids=str
)
def test_those_who_lack_the_state_get_all_of_it(size, holders):
    with forked.ranks(exchange, list(range(size)), size, holders) as answers:
        expected = digest(state(1))
        whole = sum(len(one) for one in expected[1])
        for rank, answer in answers.items():
            assert answer == (None if rank in holders else (expected, whole))


def test_transfer_is_received_in_place_where_there_is_room():
    with forked.ranks(in_place, [0, 1]) as answers:
        received, kept = answers[1]
    assert received == digest(state(1))
    small = [f"['small'][{number}]" for number in range(1, 40)]
    # "gaps" is received without gaps, and "large" was smaller.
    assert kept == [*small, "['image']", "['scalar']", "['array']"]


def test_a_holder_that_dies_is_noticed_by_who_receives():
    with forked.ranks(bereaved, [0, 1, 2]) as answers:
        assert answers[1] is None
        assert answers[2] in ("PeerLostError", "RuntimeError")


GOOD = b'{"tree":null,"tensors":[]}'


@pytest.mark.parametrize(
    ("header", "text", "message"),
    [
        ([1, 2, 3, 4], GOOD, "Received something other than a peer's state."),
        ([transfer.MAGIC, 1 << 40, 0, 0], GOOD, "Received something other than a peer's state."),
        ([transfer.MAGIC, len(GOOD), 7, 0], GOOD, "was damaged in transfer"),
        (
            [transfer.MAGIC, len(GOOD), zlib.crc32(GOOD), 9],
            GOOD,
            "The size of a peer's state differs",
        ),
    ],
    ids=["magic", "length", "checksum", "size"],
)
def test_transfer_that_is_no_state_is_refused(header, text, message):
    with forked.ranks(misled, [0, 1], header, text) as answers:
        assert message in answers[1]
