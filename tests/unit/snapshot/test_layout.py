"""A memory for snapshots: whatever is cut short, what was sealed before is found."""

import os
import random
import signal
import time
from contextlib import contextmanager

import pytest

from tests.support import SOAK
from torchelastic.snapshot import layout
from torchelastic.snapshot.layout import Memory, Sizes

SIZES = Sizes(bytes=10_000, skeleton=200)


@contextmanager
def memory(sizes=SIZES):
    descriptor = layout.create(sizes)
    made = Memory(descriptor)
    try:
        yield made, descriptor
    finally:
        made.close()
        os.close(descriptor)


@pytest.fixture
def pair():
    with memory() as made:
        yield made


@pytest.fixture
def made(pair):
    return pair[0]


@pytest.fixture
def descriptor(pair):
    return pair[1]


def content(version):
    return bytes([version[1] % 251]) * 5_000


def publish(made, version, skeleton=None, **writer):
    data = content(version)
    made.begin(version)[: len(data)] = data
    text = skeleton or f"[{version[0]}, {version[1]}]".encode()
    made.seal(version, text, len(data), layout.checksum(data), **writer)


def versions(made):
    return [held.version for held in made.holdings()]


def assert_sound(made):
    """All that is held is what was written for its version."""
    for held in made.holdings():
        assert held.is_whole()
        assert held.data == content(held.version)
        assert held.skeleton == f"[{held.version[0]}, {held.version[1]}]".encode()


def test_a_new_memory_holds_nothing_and_has_the_sizes_it_was_made_with(made, descriptor):
    assert made.freshest() is None
    assert made.sizes == layout.sizes_of(descriptor) == SIZES


def test_sealed_version_is_found_with_its_writer(made, descriptor):
    publish(made, (2, 7), rank=3, size=4)
    reader = Memory(descriptor, writable=False)
    held = reader.freshest()
    assert (held.version, held.rank, held.size) == ((2, 7), 3, 4)
    assert held.data.readonly
    assert_sound(reader)
    reader.close()


def test_the_oldest_buffer_is_written_next_and_is_torn_at_once(made):
    for step in range(1, 4):
        publish(made, (0, step))
    assert versions(made) == [(0, 3), (0, 2)]
    made.begin((0, 4))
    assert versions(made) == [(0, 3)]


def test_own_pieces_keep_a_version_more():
    with memory(Sizes(10_000, 200, layout.buffers_for(layout.own(0)))) as (made, _):
        for step in range(1, 6):
            publish(made, (0, step))
        made.begin((0, 6))
        assert versions(made) == [(0, 5), (0, 4)]


def test_a_later_generation_is_fresher_than_a_later_step(made):
    publish(made, (0, 90))
    publish(made, (1, 7))
    assert made.freshest().version == (1, 7)


def test_a_version_that_is_no_fresher_is_not_begun(made):
    publish(made, (0, 5))
    for version in ((0, 4), (0, 5)):
        with pytest.raises(ValueError, match="cannot follow"):
            made.begin(version)
    assert versions(made) == [(0, 5)]


def test_void_versions_are_overwritten_first(made):
    publish(made, (0, 10))
    publish(made, (0, 11))
    made.drop_void((0, 10), 1)
    assert versions(made) == [(0, 10)]
    made.begin((1, 11))
    assert versions(made) == [(0, 10)]


def test_a_version_that_was_overwritten_is_noticed(made):
    publish(made, (0, 1))
    held = made.freshest()
    publish(made, (0, 2))
    assert made.still_holds(held)
    made.begin((0, 3))
    assert not made.still_holds(held)


def test_a_number_that_is_used_again_is_not_taken_for_the_version_that_had_it(made):
    publish(made, (0, 10))
    publish(made, (0, 11))
    held = made.freshest()
    made.drop_void((0, 10), 1)
    publish(made, (1, 11))
    assert made.freshest().number == held.number
    assert not made.still_holds(held)


def test_seal_refuses_versions_too_large_or_not_begun(made):
    publish(made, (0, 1))
    with pytest.raises(ValueError, match="begun"):
        made.seal((0, 2), b"", 0, 0)
    made.begin((0, 2))
    with pytest.raises(ValueError, match="request more memory"):
        made.seal((0, 2), b"x" * 201, 1, 0)
    with pytest.raises(ValueError, match="request more memory"):
        made.seal((0, 2), b"", 10_001, 0)
    assert versions(made) == [(0, 1)]


def test_bytes_that_changed_are_noticed_by_their_checksum(made, descriptor):
    publish(made, (0, 1))
    held = made.freshest()
    os.pwrite(descriptor, b"?", SIZES.buffer_at(held.index) + 17)
    assert not held.is_whole()


def test_memory_size_is_sealed(descriptor):
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 100)


def test_views_outlive_the_memory_they_are_of(made):
    publish(made, (0, 1))
    data = made.freshest().data
    made.close()
    assert data == content((0, 1))


def test_a_foreign_file_is_no_memory(tmp_path):
    path = tmp_path / "foreign"
    path.write_bytes(b"\0" * 8192)
    with path.open("rb") as file, pytest.raises(ValueError, match="does not hold snapshots"):
        layout.sizes_of(file.fileno())


def test_a_memory_of_another_size_than_it_says_is_refused():
    descriptor = os.memfd_create("short")
    try:
        os.pwrite(descriptor, layout._SIZES.pack(b"TESNAP01", 2, 1 << 40, 0), 0)
        with pytest.raises(ValueError, match="differs from the size in its header"):
            layout.sizes_of(descriptor)
    finally:
        os.close(descriptor)


def test_invalid_piece_name_is_refused():
    for piece in ("", "own:", "own:x", "own:-1", "sharded", "own:²", "own:" + "9" * 20):
        with pytest.raises(ValueError, match="is not a piece"):
            layout.rank_of(piece)


# --- a writer that is cut short --------------------------------------------------------------


class Cut(Exception):
    """The writer has been killed."""


class CutShort(Memory):
    """Is killed after so many bytes that it has stored in the header or a skeleton."""

    left = 0

    def _store(self, offset, data):
        if len(data) > self.left:
            super()._store(offset, data[: self.left])
            raise Cut
        self.left -= len(data)
        super()._store(offset, data)


def stored_by_a_version():
    """How many bytes one version stores beside its own."""
    with memory() as (_, descriptor):
        writer = CutShort(descriptor)
        writer.left = 10**6
        publish(writer, (0, 1))
        writer.close()
        return 10**6 - writer.left


@pytest.mark.parametrize("steps_before", [1, 2, 5])
def test_a_writer_cut_after_any_byte_leaves_what_was_sealed_before(steps_before):
    total = stored_by_a_version()
    assert total > 70
    for cut in range(total):
        with memory() as (made, descriptor):
            for step in range(1, steps_before + 1):
                publish(made, (0, step))
            writer = CutShort(descriptor)
            writer.left = cut
            with pytest.raises(Cut):
                publish(writer, (0, steps_before + 1))
            writer.close()
            # Before the first byte nothing has happened at all.
            kept = [(0, steps_before), (0, steps_before - 1)]
            assert versions(made) == (kept[:1] if cut or steps_before == 1 else kept)
            assert_sound(made)
            # And whoever comes after it goes on as if nothing had been.
            publish(made, (1, steps_before + 1))
            assert versions(made) == [(1, steps_before + 1), (0, steps_before)]
            assert_sound(made)


def write_until_killed(descriptor, generation):
    made = Memory(descriptor)
    for step in range(1, 10**6):
        publish(made, (generation, step))


def test_writers_killed_at_any_time_leave_what_they_had_sealed():
    """Each goes on from what the one before has left, as the workers of generations do."""
    delays = random.Random(7)
    with memory() as (made, descriptor):
        publish(made, (0, 0))
        for generation in range(1, 1 + 10 * SOAK):
            before = made.freshest().version
            pid = os.fork()
            if pid == 0:
                try:
                    write_until_killed(descriptor, generation)
                finally:
                    os._exit(1)
            time.sleep(delays.uniform(0.0, 0.01))  # any time will do, that is what is tested
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert made.freshest().version >= before
            assert_sound(made)
        assert made.freshest().version > (1, 0)
