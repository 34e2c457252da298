"""State sent from those who have it to those who lack it, between real processes."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.process import forked, sharing
from torchelastic.tensors import transfer

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
    with forked.ranks(sharing.exchange, list(range(size)), size, holders) as answers:
        expected = sharing.digest(sharing.state(1))
        whole = sum(len(one) for one in expected[1])
        for rank, answer in answers.items():
            assert answer == (None if rank in holders else (expected, whole))


def test_transfer_is_received_in_place_where_there_is_room():
    with forked.ranks(sharing.in_place, [0, 1]) as answers:
        received, kept = answers[1]
    assert received == sharing.digest(sharing.state(1))
    small = [f"['small'][{number}]" for number in range(1, 40)]
    # "gaps" is received without gaps, and "large" was smaller.
    assert kept == [*small, "['image']", "['scalar']", "['array']"]


def test_a_holder_that_dies_is_noticed_by_who_receives():
    with forked.ranks(sharing.bereaved, [0, 1, 2]) as answers:
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
    with forked.ranks(sharing.misled, [0, 1], header, text) as answers:
        assert message in answers[1]
