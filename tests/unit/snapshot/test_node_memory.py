"""The memory of a node: the pieces it holds, and when it lets go of them."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchelastic.snapshot import layout
from torchelastic.snapshot.layout import SHARED, own, shard
from torchelastic.snapshot.node import memory as module
from torchelastic.snapshot.node.memory import SnapshotMemory
from torchelastic.system import memory_limit
from torchelastic.system.memory_limit import Limit, NoRoom


@pytest.fixture
def snapshot_memory():
    made = SnapshotMemory()
    yield made
    made.close()


def write(snapshot_memory, piece, version, size=1000, origin=""):
    if origin:
        kept = snapshot_memory.memory_for_replica(piece, origin, size, 100)
    else:
        kept = snapshot_memory.memory_for(piece, size, 100)
    data = bytes([version[1] % 256]) * 10
    kept.memory.begin(version)[:10] = data
    kept.memory.seal(version, b"{}", 10, layout.checksum(data))
    if not origin:
        snapshot_memory.sealed([(piece, version)])
    return kept


def held(snapshot_memory):
    return [(item.piece, item.version, item.replica) for item in snapshot_memory.holdings()]


def test_a_piece_keeps_its_memory(snapshot_memory):
    first = snapshot_memory.memory_for(SHARED, 1000, 100)
    assert snapshot_memory.memory_for(SHARED, 1000, 100) is first
    assert snapshot_memory.memory_for(SHARED, 900, 50) is first
    large = snapshot_memory.memory_for(own(0), 8 << 20, 100)
    assert snapshot_memory.memory_for(own(0), 100, 100) is not large
    with pytest.raises(ValueError, match="is not a piece"):
        snapshot_memory.memory_for("own:x", 10, 10)


def test_a_piece_that_has_grown_gets_another_and_keeps_the_old_until_it_is_of_no_use(
    snapshot_memory,
):
    write(snapshot_memory, SHARED, (0, 5))
    write(snapshot_memory, SHARED, (1, 6), size=4000)
    assert (SHARED, (0, 5), False) in held(snapshot_memory)
    write(snapshot_memory, SHARED, (1, 7), size=4000)
    write(snapshot_memory, SHARED, (1, 8), size=4000)
    assert held(snapshot_memory) == [(SHARED, (1, 8), False), (SHARED, (1, 7), False)]


def test_pieces_of_older_generations_go_when_this_one_has_committed_enough(snapshot_memory):
    write(snapshot_memory, own(2), (0, 5))
    write(snapshot_memory, own(3), (0, 5), origin="b")
    for step in (6, 7):
        write(snapshot_memory, own(0), (1, step))
    assert {piece for piece, _, _ in held(snapshot_memory)} == {own(0), own(2), own(3)}
    write(snapshot_memory, own(0), (1, 8))
    assert {piece for piece, _, _ in held(snapshot_memory)} == {own(0)}


def test_a_piece_of_an_older_generation_that_comes_late_is_let_go_of(snapshot_memory):
    for step in (6, 7, 8):
        write(snapshot_memory, own(0), (1, step))
    late = snapshot_memory.memory_for_replica(own(3), "b", 1000, 100)
    with snapshot_memory.bringing(late):
        write(snapshot_memory, own(3), (0, 5), origin="b")
    assert {piece for piece, _, _ in held(snapshot_memory)} == {own(0)}


def test_memory_keeps_older_pieces_until_replicas_exist(snapshot_memory):
    snapshot_memory.awaits_replicas = True
    write(snapshot_memory, own(2), (0, 5))
    for step in (6, 7, 8):
        write(snapshot_memory, own(0), (1, step))
    assert own(2) in {piece for piece, _, _ in held(snapshot_memory)}
    snapshot_memory.note_replicated(own(0), (1, 7))
    assert {piece for piece, _, _ in held(snapshot_memory)} == {own(0)}


def test_without_replicas_no_more_than_the_generation_before_is_kept(snapshot_memory):
    snapshot_memory.awaits_replicas = True
    for generation in range(4):
        for step in (1, 2, 3):
            write(snapshot_memory, own(generation), (generation, step))
    assert {piece for piece, _, _ in held(snapshot_memory)} == {own(2), own(3)}


def test_void_versions_are_dropped(snapshot_memory):
    write(snapshot_memory, SHARED, (0, 10))
    write(snapshot_memory, SHARED, (0, 11))
    write(snapshot_memory, own(1), (0, 11), origin="b")
    snapshot_memory.drop_void((0, 10), 1)
    assert held(snapshot_memory) == [(SHARED, (0, 10), False)]


@pytest.fixture
def memories():
    """Tells which memories were made since the test has begun and are open; others' may be, too."""
    before = _open_memories()
    return lambda: _open_memories() - before


def _open_memories():
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if "torchelastic-snapshot" in os.readlink(f"/proc/self/fd/{descriptor}"):
                found.add(os.stat(f"/proc/self/fd/{descriptor}").st_ino)
        except FileNotFoundError:  # the one that the directory was listed by
            continue
    return found


@pytest.mark.parametrize(
    ("base", "left"),
    [
        ((0, 12), []),
        ((0, 11), [own(1)]),
        ((0, 10), [SHARED, own(1)]),
        ((1, 2), []),
        ((0, 8), []),  # all of it is void
    ],
)
def test_a_node_outside_the_world_gives_back_what_is_void_or_older_than_the_base(
    snapshot_memory, memories, base, left
):
    write(snapshot_memory, SHARED, (0, 9))
    write(snapshot_memory, SHARED, (0, 10))
    write(snapshot_memory, own(1), (0, 10), origin="b")
    write(snapshot_memory, own(1), (0, 11), origin="b")
    snapshot_memory.drop_void(base, 2, outside=True)
    assert list(dict.fromkeys(piece for piece, _, _ in held(snapshot_memory))) == left
    assert bool(memories()) is bool(left)


def test_memory_of_outdated_versions_is_given_back(snapshot_memory, memories):
    write(snapshot_memory, shard(0), (0, 9))
    write(snapshot_memory, shard(0), (0, 10))
    snapshot_memory.drop_before((0, 10))
    assert held(snapshot_memory)
    snapshot_memory.drop_before((2, 5))
    assert not memories()
    late = write(snapshot_memory, shard(1), (0, 10), origin="b")
    with snapshot_memory.bringing(late) as may:
        assert may
    assert not memories()
    fresh = write(snapshot_memory, shard(1), (2, 6), origin="b")
    with snapshot_memory.bringing(fresh):
        pass
    assert held(snapshot_memory) == [(shard(1), (2, 6), True)]


def test_memory_keeps_a_piece_that_is_being_received(snapshot_memory):
    kept = write(snapshot_memory, own(1), (0, 10), origin="b")
    with kept.writing:
        snapshot_memory.drop_void((1, 2), 2, outside=True)
    assert held(snapshot_memory) == [(own(1), (0, 10), True)]


def test_in_the_world_memory_stays_for_those_who_write_to_it(snapshot_memory):
    kept = write(snapshot_memory, SHARED, (0, 11))
    snapshot_memory.drop_void((0, 10), 1)
    assert held(snapshot_memory) == []
    assert snapshot_memory.memory_for(SHARED, 1000, 100) is kept


def test_a_held_snapshot_can_be_opened_after_its_memory_is_closed(snapshot_memory):
    write(snapshot_memory, own(0), (0, 5))
    assert snapshot_memory.open(own(0), (0, 4)) is None
    descriptor = snapshot_memory.open(own(0), (0, 5))
    snapshot_memory.close()
    memory = layout.Memory(descriptor)
    assert memory.freshest().version == (0, 5)
    memory.close()
    os.close(descriptor)


def test_the_freshest_of_a_piece_is_that_of_this_nodes_workers(snapshot_memory):
    write(snapshot_memory, own(0), (0, 3))
    write(snapshot_memory, own(0), (0, 9), origin="b")
    with snapshot_memory.reading(own(0), None) as (_, _, found):
        assert found.version == (0, 3)


def test_memory_lists_pieces_fresher_than_known(snapshot_memory):
    write(snapshot_memory, SHARED, (0, 5))
    write(snapshot_memory, own(0), (0, 5))
    write(snapshot_memory, own(1), (0, 4))
    write(snapshot_memory, own(7), (0, 4), origin="b")
    assert snapshot_memory.fresher_than({}) == [own(0), own(1)]
    assert snapshot_memory.fresher_than({own(0): (0, 4), own(1): (0, 4)}) == [own(0)]


def test_own_pieces_have_a_buffer_more_to_be_copied_from():
    with_replicas = SnapshotMemory(replicated=True)
    try:
        assert with_replicas.memory_for(own(0), 10, 10).sizes.buffers == 4
        for piece in (SHARED, shard(0)):
            assert with_replicas.memory_for(piece, 10, 10).sizes.buffers == 2
    finally:
        with_replicas.close()


def test_no_room_is_reported_and_nothing_is_taken(snapshot_memory, monkeypatch):
    monkeypatch.setattr(memory_limit, "limits", lambda: [Limit("its cgroup", 4 << 20, 1 << 20)])
    with pytest.raises(NoRoom, match="No room for snapshots of 'shared'"):
        snapshot_memory.memory_for(SHARED, 4 << 20, 100)
    assert snapshot_memory.memory_for(SHARED, 1000, 100).sizes.bytes == 1000


def test_only_so_many_copies_are_held_and_those_that_never_came_go_first(
    snapshot_memory, monkeypatch
):
    monkeypatch.setattr(module, "MOST_REPLICAS", 3)
    write(snapshot_memory, own(0), (0, 1), origin="a")
    for name in ("x", "y", "z"):
        snapshot_memory.memory_for_replica(own(0), name, 10, 10)
    for name in ("b", "c"):
        write(snapshot_memory, own(0), (0, 1), origin=name)
    with pytest.raises(NoRoom, match="already holds 3 copies"):
        snapshot_memory.memory_for_replica(own(0), "d", 10, 10)
    write(snapshot_memory, own(0), (0, 2), origin="c")
    assert len(held(snapshot_memory)) == 4


def test_memory_without_holders_waits_for_no_copies(snapshot_memory):
    assert write(snapshot_memory, shard(0), (0, 5)).memory.replicated() == (0, 5)
    snapshot_memory.awaits_replicas = True
    kept = write(snapshot_memory, shard(0), (0, 6))
    assert kept.memory.replicated() == (0, 5)
    snapshot_memory.note_replicated(shard(0), (0, 6))
    assert kept.memory.replicated() == (0, 6)


def test_a_version_that_is_reported_twice_counts_once(snapshot_memory):
    write(snapshot_memory, own(1), (0, 5))
    write(snapshot_memory, own(0), (1, 6))
    for _ in range(3):
        snapshot_memory.sealed([(own(0), (1, 6))])
    assert (own(1), (0, 5), False) in held(snapshot_memory)


# --- at the same time -----------------------------------------------------------------------------


def test_a_memory_keeps_its_descriptor_while_something_is_brought_to_it(snapshot_memory, tmp_path):
    """Let go of, its number would be that of the next file, which the bytes would go to."""
    kept = write(snapshot_memory, own(7), (0, 5), origin="b")
    with snapshot_memory.bringing(kept) as may:
        assert may
        for step in (6, 7, 8):
            write(snapshot_memory, own(0), (1, step))
        with open(tmp_path / "log", "wb") as log:
            assert log.fileno() != kept.descriptor
        assert (own(7), (0, 5), True) in held(snapshot_memory)
    write(snapshot_memory, own(0), (1, 9))
    assert (own(7), (0, 5), True) not in held(snapshot_memory)


def test_so_it_does_when_a_larger_one_is_asked_for_meanwhile(snapshot_memory):
    kept = snapshot_memory.memory_for_replica(own(7), "b", 1000, 100)
    with snapshot_memory.bringing(kept):
        assert snapshot_memory.memory_for_replica(own(7), "b", 8000, 100) is not kept
        kept.memory.begin((0, 1))
        os.pwrite(kept.descriptor, b"here", kept.memory.begun_at)
        kept.memory.seal((0, 1), b"{}", 4, layout.checksum(b"here"))
    assert held(snapshot_memory) == [(own(7), (0, 1), True)]


def test_nothing_is_brought_twice_at_a_time_nor_to_what_was_let_go_of(snapshot_memory):
    kept = snapshot_memory.memory_for_replica(own(7), "b", 1000, 100)
    with snapshot_memory.bringing(kept), snapshot_memory.bringing(kept) as second:
        assert not second
    snapshot_memory.memory_for_replica(own(7), "b", 8000, 100)
    with snapshot_memory.bringing(kept) as gone:
        assert not gone


def test_memory_keeps_a_version_sealed_while_void_ones_are_dropped(snapshot_memory):
    """The worker is ahead of the agent: it has torn what is void, and put the next in its place."""
    kept = snapshot_memory.memory_for(SHARED, 1000, 100)
    worker = layout.Memory(kept.descriptor)

    def seal(version):
        worker.begin(version)[:1] = b"x"
        worker.seal(version, b"{}", 1, layout.checksum(b"x"))

    seal((0, 10))
    seal((0, 11))
    look = kept.memory.holdings

    def holdings():
        found = look()
        kept.memory.holdings = look
        worker.drop_void((0, 10), 1)
        seal((1, 11))
        return found

    kept.memory.holdings = holdings
    snapshot_memory.drop_void((0, 10), 1)
    assert held(snapshot_memory) == [(SHARED, (1, 11), False), (SHARED, (0, 10), False)]
    worker.close()


def test_memory_tears_void_versions_at_the_next_write(snapshot_memory):
    kept = write(snapshot_memory, own(1), (0, 11), origin="b")
    snapshot_memory.drop_void((0, 10), 1)
    assert held(snapshot_memory) == []
    assert kept.memory.find((0, 11)) is not None
    with snapshot_memory.bringing(kept):
        assert kept.memory.find((0, 11)) is None
        kept.memory.begin((0, 10))


def test_memory_pin_lasts_until_the_last_reader_ends(snapshot_memory):
    kept = write(snapshot_memory, own(0), (0, 1))
    first = snapshot_memory.reading(own(0), (0, 1))
    with snapshot_memory.reading(own(0), (0, 1)) as (memory, _, found):
        with first:
            pass
        for step in (2, 3, 4, 5):
            write(snapshot_memory, own(0), (0, step))
        assert memory.still_holds(found)
    write(snapshot_memory, own(0), (0, 6))
    assert kept.memory.find((0, 1)) is None


def test_memory_counts_pages_while_they_are_allocated(snapshot_memory, monkeypatch):
    begun, goes_on, take = threading.Event(), threading.Event(), os.posix_fallocate

    def slow(descriptor, begin, length):
        begun.set()
        assert goes_on.wait(30)
        take(descriptor, begin, length)

    write(snapshot_memory, own(0), (0, 1))
    monkeypatch.setattr(layout.os, "posix_fallocate", slow)
    monkeypatch.setattr(memory_limit, "limits", lambda: [Limit("its cgroup", 8 << 20, 1 << 20)])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(snapshot_memory.memory_for, SHARED, 2 << 20, 100)
        assert begun.wait(30)
        second = pool.submit(snapshot_memory.memory_for, SHARED, 2 << 20, 100)
        assert held(snapshot_memory) == [(own(0), (0, 1), False)]
        with pytest.raises(NoRoom, match=r"and 2\.6 MiB of the 8\.0 MiB"):
            snapshot_memory.memory_for(shard(1), 2 << 20, 100)
        goes_on.set()
        assert first.result() is second.result()
    assert snapshot_memory.memory_for(shard(1), 2 << 20, 100)
    assert snapshot_memory._promised == 0


def test_pages_that_cannot_be_taken_are_not_promised_any_more(
    snapshot_memory, memories, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(layout.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"):
        snapshot_memory.memory_for(SHARED, 1000, 100)
    assert snapshot_memory._promised == 0
    assert not memories()


def test_replicas_of_nodes_that_are_lost_become_our_own(snapshot_memory):
    write(snapshot_memory, own(0), (0, 5))
    write(snapshot_memory, own(2), (0, 5), origin="b")
    write(snapshot_memory, own(3), (0, 5), origin="c")
    assert not snapshot_memory.adopt({"a", "b", "c"})
    assert snapshot_memory.adopt({"a", "c"})
    assert held(snapshot_memory) == [
        (own(0), (0, 5), False),
        (own(2), (0, 5), False),
        (own(3), (0, 5), True),
    ]
    assert snapshot_memory.fresher_than({}) == [own(0), own(2)]
    write(snapshot_memory, own(2), (1, 6))  # the rank is on this node now
    assert snapshot_memory.fresher_than({own(0): (0, 5), own(2): (0, 5)}) == [own(2)]
