"""The catalog and its decisions: who may write, which checkpoints count, which are removed."""

from __future__ import annotations

import fcntl
import math
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, replace

import fsspec
import pytest

from torchelastic.checkpoint import fence, interval, marker
from torchelastic.checkpoint.catalog import Catalog, Fenced, name_of, removable
from torchelastic.checkpoint.fence import Fence, WorldStart, WriteVerdict
from torchelastic.checkpoint.interval import (
    ASSUMED_TIME_BETWEEN_FAILURES,
    BACKGROUND_COST,
    SHORTEST_INTERVAL,
    CheckpointSchedule,
    Every,
    Measured,
    automatic,
    best_interval,
    between_failures,
    parse,
)
from torchelastic.checkpoint.marker import File, History, Marker
from torchelastic.checkpoint.storage.storage import LocalStorage, open_storage
from torchelastic.errors import ConfigError


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    if request.param == "local":
        yield LocalStorage(tmp_path)
        return
    yield open_storage(f"memory://{tmp_path.name}")
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def catalog(storage):
    return Catalog(storage, keep_last=1)


def of_generation(number, start="s"):
    return Fence(f"{number:06x}", "job", start, number)


def write(catalog, mine, step):
    draft = catalog.begin(name_of(catalog.next_sequence(), step, mine.token))
    stream = draft.writer("file")
    stream.write(b"content")
    draft.close_file("file", stream)
    return catalog.commit(draft, Marker(step, mine.generation, draft.files, mine.start), mine)


def steps(catalog):
    return [record.step for record in catalog.records()]


def names(catalog):
    return [record.name for record in catalog._committed()]


def test_a_world_that_is_over_cannot_take_its_turn_any_more(storage):
    catalog, third, fourth = Catalog(storage), of_generation(3), of_generation(4)
    catalog.take(third, base=0)
    write(catalog, third, 100)
    write(catalog, third, 120)
    catalog.take(fourth, base=100)
    with pytest.raises(Fenced, match="generation 4 of job 'job' now writes"):
        catalog.take(third, base=0)
    with pytest.raises(Fenced, match="the checkpoint of generation 3 is void"):
        write(catalog, third, 130)
    assert steps(catalog) == [100]


def test_two_ranks_that_both_save_are_reported(catalog):
    catalog.take(of_generation(0), base=None)
    other = Fence("other", "job", "s", 0)
    with pytest.raises(Fenced, match="call save on rank 0 only, or on all ranks with together"):
        write(catalog, other, 10)


def test_void_ones_are_removed_once_there_is_a_newer_good_one(catalog):
    base = 0
    for number in range(6):
        mine = of_generation(number)
        catalog.take(mine, base)
        write(catalog, mine, base + 10)
        write(catalog, mine, base + 20)
        base += 15
        assert len(names(catalog)) <= 2
    assert steps(catalog) == [95]


def test_void_ones_stay_while_nothing_good_came_after(catalog):
    first = of_generation(0)
    catalog.take(first, base=0)
    write(catalog, first, 100)
    catalog.take(of_generation(1), base=50)
    catalog.tidy()
    assert len(names(catalog)) == 1
    assert steps(catalog) == []


def test_a_start_remembers_what_it_has_seen(catalog):
    writer = of_generation(3)
    catalog.take(writer, base=0)
    draft = catalog.begin(name_of(0, 10, writer.token))
    catalog.commit(draft, Marker(10, 3, {}, "s", History(60.0, 1)), writer)
    assert catalog.history(of_generation(3)) == History(60.0, 1)
    assert catalog.history(of_generation(5)) == History(60.0, 3)
    assert catalog.history(of_generation(0, "another")) == History()
    assert catalog.history(of_generation(5, "")) == History()


def test_latest_names_none_that_is_void(storage):
    catalog, first = Catalog(storage), of_generation(0)
    catalog.take(first, base=0)
    kept = write(catalog, first, 10)
    write(catalog, first, 20)
    catalog.take(of_generation(1), base=15)
    assert storage.get("latest") == f"{kept.name}\n".encode()
    catalog.take(of_generation(2), base=5)
    assert storage.get("latest") is None


@pytest.mark.parametrize("damage", [b'{"token"', None])
def test_a_damaged_fence_blocks_no_good_checkpoint(storage, caplog, damage):
    """One that is cut off, and one with a wrong number."""
    catalog, first, second = Catalog(storage), of_generation(0), of_generation(1)
    catalog.take(first, base=0)
    write(catalog, first, 10)
    write(catalog, first, 20)
    catalog.take(second, base=10)
    whole = storage.get("fence.json")
    wrong = damage or whole.replace(b'"base": 10', b'"base": 90')
    storage.put("fence.json", wrong)
    assert steps(catalog) == [20, 10], "nobody knows that 20 is void, and it is a good state"
    write(catalog, second, 20)
    assert steps(catalog) == [20, 10], "the earlier 20 is told to be void by its number"
    assert storage.get("fence.json") not in (whole, wrong), "it is whole again"
    write(catalog, second, 30)
    assert steps(catalog) == [30, 20, 10]
    assert caplog.text.count("fence.json is damaged") == 1


def test_a_damaged_fence_lets_in_no_world_that_is_over(storage):
    catalog, first, second = Catalog(storage), of_generation(0), of_generation(1)
    catalog.take(first, base=0)
    catalog.take(second, base=0)
    write(catalog, second, 10)
    storage.put("fence.json", b"{}")
    with pytest.raises(Fenced, match="the checkpoint of generation 0 is void"):
        write(catalog, first, 20)
    with pytest.raises(Fenced, match="the checkpoint of generation 0 is void"):
        catalog.take(first, base=0)
    catalog.take(of_generation(2), base=10)
    assert steps(catalog) == [10]


def test_catalog_writer_without_the_fence_removes_no_drafts(tmp_path):
    catalog = Catalog(open_storage(f"memory://{tmp_path.name}"), keep_last=1)
    old, new = of_generation(0), of_generation(1)
    catalog.take(old, base=0)
    catalog.take(new, base=0)
    draft = catalog.begin(name_of(0, 10, new.token))
    draft.close_file("file", draft.writer("file"))
    catalog.tidy(old)
    assert "file" in catalog.storage.sizes(draft.directory)
    fsspec.filesystem("memory").store.clear()


def test_paths_and_urls_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    urls = ["/a/b", "file:///a%20b", "local:///a/b", "~/b"]
    assert [open_storage(url).place for url in urls] == ["/a/b", "/a b", "/a/b", f"{tmp_path}/b"]
    with pytest.raises(ConfigError, match=r"s3:/bucket/x looks like a URL: write s3://bucket/x"):
        open_storage("s3:/bucket/x")


def test_a_file_system_with_directories_makes_them(tmp_path):
    from torchelastic.checkpoint.storage.fsspec_storage import FsspecStorage

    storage = FsspecStorage(f"file://{tmp_path}/not/there", {})
    storage.put("fence.json", b"{}")
    assert storage.get("fence.json") == b"{}"


# --- retention, grace, the fence and the marker: decisions, as tables -----------------------------


@dataclass(frozen=True)
class Dated:
    step: int | None


# --- retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "keep_last", "keep_every", "gone"),
    [
        ([30, 20, 10], None, None, []),
        ([30, 20, 10], None, 20, []),
        ([30, 20, 10], 2, None, [10]),
        ([30, 20, 10], 1, 20, [10]),
        ([30, 25, 20, 15, 10, 5], 1, 10, [25, 15, 5]),
        ([30, 20], 5, None, []),
        # The newest stays, whatever is asked for.
        ([30], 0, None, []),
        ([None, 20, None], 1, 10, [None]),
        ([], 1, 1, []),
    ],
)
def test_retention_removes_all_but_the_kept(steps, keep_last, keep_every, gone):
    found = removable(list(map(Dated, steps)), keep_last=keep_last, keep_every=keep_every)
    assert [one.step for one in found] == gone


# --- grace ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "expected", "step", "saved", "save"),
    [
        (30.0, 2.0, 100, None, True),
        (30.0, 2.0, 100, 90, True),
        (30.0, 2.0, 100, 100, False),
        (30.0, 20.0, 100, 90, True),
        (30.0, 21.0, 100, 90, False),
        (0.0, 0.1, 100, 90, False),
        (-1.0, 0.1, 100, 90, False),
        # Nobody says how long there is, or nobody knows how long it takes: half of one is harmless.
        (None, 500.0, 100, 90, True),
        (30.0, None, 100, None, True),
        (None, None, 100, 100, False),
    ],
)
def test_leave_saves_if_the_time_is_enough(left, expected, step, saved, save):
    found, why = interval.decide_before_leaving(
        grace=left, expected=expected, step=step, saved=saved
    )
    assert found is save
    assert str(step) in why


# --- the fence ------------------------------------------------------------------------------------

MY_FENCE = Fence("mine", "job", "", 3)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (MY_FENCE, WriteVerdict.MINE),
        (Fence(), WriteVerdict.VOID),
        (Fence("other", "job", "", 4), WriteVerdict.VOID),
        (Fence("other", "job", "", 3), WriteVerdict.VOID),
        # One that is over came late.
        (Fence("other", "job", "", 2), WriteVerdict.RETAKE),
        # Another job, whose generations say nothing of ours.
        (Fence("other", "another", "", 2), WriteVerdict.VOID),
        # The job was started anew, and counts from 0 again.
        (Fence("other", "job", "later", 0), WriteVerdict.VOID),
    ],
)
def test_fence_verdict_for_each_writer(found, verdict):
    assert fence.judge(found, MY_FENCE) is verdict


@pytest.mark.parametrize(
    ("found", "mine", "late"),
    [
        (Fence("a", "job", "s", 4), Fence("b", "job", "s", 3), True),
        (Fence("a", "job", "s", 3), Fence("b", "job", "s", 3), False),
        (Fence("a", "job", "s", 2), Fence("b", "job", "s", 3), False),
        (Fence("a", "job", "s", 4), Fence("b", "job", "t", 0), False),
        (Fence("a", "job", "", 4), Fence("b", "job", "", 0), False),
        (Fence(), Fence("b", "job", "s", 0), False),
    ],
)
def test_a_world_that_is_over_comes_too_late(found, mine, late):
    assert fence.is_late(found, mine) is late


def test_a_world_voids_what_is_beyond_its_base():
    first = fence.taken(Fence(), Fence("a", "job", "", 0), sequence=-1, base=0)
    second = fence.taken(first, Fence("b", "job", "", 1), sequence=4, base=120)
    assert second.worlds == (WorldStart(-1, 0), WorldStart(4, 120))
    assert not fence.is_void(4, 120, second.worlds)
    assert fence.is_void(4, 121, second.worlds)
    assert not fence.is_void(5, 121, second.worlds), "written since, by the world itself"
    assert not fence.is_void(4, None, second.worlds)


@pytest.mark.parametrize(
    ("base", "worlds"),
    [
        (70, (WorldStart(3, 50), WorldStart(8, 70))),
        (0, (WorldStart(8, 0),)),  # what a later world says again is forgotten
        (None, (WorldStart(3, 50), WorldStart(5, 90))),  # without a base nothing is void
    ],
)
def test_fence_of_several_worlds_voids_later_steps(base, worlds):
    before = Fence("a", "job", "", 1, (WorldStart(3, 50), WorldStart(5, 90)))
    assert fence.taken(before, MY_FENCE, sequence=8, base=base).worlds == worlds


def test_a_fence_is_read_back_and_junk_is_none():
    whole = Fence("a", "job", "", 1, (WorldStart(3, 50),))
    assert fence.from_json(fence.to_json(whole)) == whole
    assert fence.from_json(None) == Fence()
    for junk in (b"", b"[]", b"{", b'{"token": 1}', b"\xff"):
        with pytest.raises(ValueError, match="not a fence"):
            fence.from_json(junk)


def test_a_damaged_fence_is_no_fence():
    """Any byte may be wrong, the checksum's name included."""
    whole = Fence("a", "job", "", 1, (WorldStart(3, 50),))
    text = fence.to_json(whole)
    for place in range(len(text)):
        damaged = bytes([*text[:place], text[place] ^ 1, *text[place + 1 :]])
        with suppress(ValueError):
            assert fence.from_json(damaged) == whole  # where it was a space, perhaps


@pytest.mark.parametrize(
    ("stored", "void"),
    [
        ([], []),
        ([(0, 10), (1, 20), (2, 30)], []),
        ([(0, 10), (1, 20), (2, 20), (3, 30)], [1]),
        ([(3, 15), (2, 30), (1, 20), (0, 10)], [1, 2]),  # in any order
        ([(0, 10), (1, 20), (2, 15), (3, 12)], [1, 2]),
        ([(0, 10), (1, None), (2, 5)], [0]),
    ],
)
def test_a_rebuilt_fence_knows_what_was_done_again(stored, void):
    worlds = fence.rebuilt(stored, Fence()).worlds
    assert [
        sequence for sequence, step in sorted(stored) if fence.is_void(sequence, step, worlds)
    ] == void


@pytest.mark.parametrize(
    ("newest", "verdict"),
    [
        (Fence(), WriteVerdict.RETAKE),
        (Fence("", "job", "s", 3), WriteVerdict.RETAKE),
        (Fence("", "job", "another", 9), WriteVerdict.RETAKE),
        (Fence("", "job", "s", 4), WriteVerdict.VOID),
    ],
)
def test_damaged_fence_is_taken_again_by_the_writer(newest, verdict):
    assert fence.judge(fence.rebuilt([], newest), replace(MY_FENCE, start="s")) is verdict


# --- the marker -----------------------------------------------------------------------------------

MARKER = Marker(7, 2, {"a": File(10, 123), "b": File(0, 0)})


def test_a_marker_is_read_back_and_junk_is_none():
    text = marker.to_json(MARKER)
    assert marker.from_json(text) == MARKER
    assert MARKER.size == 10
    bent = [text[:-20], text.replace(b"checkpoint 1", b"checkpoint 9"), text.replace(b"7", b'"7"')]
    for junk in (b"", b"{}", b"null", b"[1]", *bent):
        assert marker.from_json(junk) is None, junk


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"a": 10, "b": 0, "commit.json": 99}, None),
        ({"a": 10}, "'b' is missing"),
        ({"a": 9, "b": 0}, "'a' has 9 bytes instead of 10"),
        ({"a": 11, "b": 0}, "'a' has 11 bytes instead of 10"),
    ],
)
def test_marker_with_missing_or_short_files_is_torn(sizes, problem):
    assert marker.torn(MARKER, sizes) == problem


# --- the interval ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "every"),
    [
        (None, None),
        (500, Every(steps=500)),
        ("90s", Every(seconds=90)),
        ("1.5 m", Every(seconds=90)),
        ("2h", Every(seconds=7200)),
        ("auto", Every(auto=True)),
    ],
)
def test_interval_text_is_parsed(text, every):
    assert parse(text) == every


def test_invalid_interval_is_refused():
    for wrong in (0, -1, True, "", "0s", "soon", "5 d", "90", 1.5):
        with pytest.raises(ConfigError, match="use a number of steps"):
            parse(wrong)


@pytest.mark.parametrize(
    ("cost", "mean", "best"),
    [
        # Young's rule is sqrt(2 C M); Daly's adds terms that matter when C is not small beside M.
        (0.0, 3600.0, 0.0),
        (1.0, 3600.0, 84.19),
        (60.0, 86400.0, 3180.0),
        (60.0, 3600.0, 617.88),
        (600.0, 3600.0, 1697.71),
        (7200.0, 3600.0, 3600.0),
        (9999.0, 3600.0, 3600.0),
    ],
)
def test_the_best_interval(cost, mean, best):
    assert best_interval(cost, mean) == pytest.approx(best, rel=1e-3)


def lost(interval, cost, mean):
    """The share of time lost to checkpoints and to failures, of a job that runs for ever.

    Daly's model: a failure in an interval costs what was done in it, and it begins anew.
    """
    useful = interval / (mean * (math.exp((interval + cost) / mean) - 1))
    return 1 - useful


@pytest.mark.parametrize(("cost", "mean"), [(1, 3600), (60, 3600), (600, 3600), (5, 100000)])
def test_no_other_interval_loses_less(cost, mean):
    best = best_interval(cost, mean)
    least = lost(best, cost, mean)
    for factor in (0.5, 0.8, 1.25, 2):
        assert lost(best * factor, cost, mean) > least


def test_failures_are_counted_from_a_prior():
    assert between_failures(0, 0) == ASSUMED_TIME_BETWEEN_FAILURES
    assert between_failures(3600, 3) == (3600 + ASSUMED_TIME_BETWEEN_FAILURES) / 4
    assert between_failures(10**7, 100) == pytest.approx(10**5, rel=0.02)


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        (Measured(0.0, 0.0, 0, 0), SHORTEST_INTERVAL),
        (Measured(0.1, 0.0, 0, 0), best_interval(0.1, ASSUMED_TIME_BETWEEN_FAILURES)),
        # What is hidden costs something, too.
        (
            Measured(0.0, 5.0, 0, 0),
            best_interval(5 * BACKGROUND_COST, ASSUMED_TIME_BETWEEN_FAILURES),
        ),
        (
            Measured(0.1, 1.0, 0, 0),
            best_interval(0.1 + BACKGROUND_COST, ASSUMED_TIME_BETWEEN_FAILURES),
        ),
        # Storage that needs longer than pays sets the pace.
        (Measured(0.1, 5000.0, 0, 0), 5000.0),
        (
            Measured(0.1, 0.0, 3600, 9),
            best_interval(0.1, (3600 + ASSUMED_TIME_BETWEEN_FAILURES) / 10),
        ),
    ],
)
def test_the_automatic_interval(measured, seconds):
    assert automatic(measured) == seconds


def test_every_so_many_steps():
    pace = CheckpointSchedule.begin(Every(steps=5), 0, now=0.0)
    assert due_of(pace, range(1, 21)) == [5, 10, 15, 20]
    assert not pace.at(10).began(10, 1.0).is_due(2.0), "once for each step"
    assert pace.at(10).at(10).is_due(0.0), "asked twice"


@pytest.mark.parametrize(
    ("every", "asked", "due"),
    [
        (2, range(1, 10, 2), [3, 5, 7, 9]),
        (7, range(5, 40, 5), [10, 15, 25, 30, 35]),
        (5, [3, 4, 5, 3, 4, 5, 6], [5, 5]),  # rolled back
        (3, [100], []),
    ],
)
def test_not_every_step_need_be_asked_about(every, asked, due):
    assert due_of(CheckpointSchedule.begin(Every(steps=every), asked[0] - 1, now=0.0), asked) == due


def due_of(pace, steps):
    due = []
    for step in steps:
        pace = pace.at(step)
        due += [step] if pace.is_due(0.0) else []
    return due


def test_every_so_many_seconds():
    pace = CheckpointSchedule.begin(Every(seconds=30), 0, now=100.0)
    assert (pace.is_due(129.9), pace.is_due(130.0)) == (False, True)
    pace = pace.began(2, 131.0)
    assert (pace.is_due(160.9), pace.is_due(161.0)) == (False, True)
    assert pace.learned(Measured(2.0, 300.0, 10.0, 0)) == pace, "it is not automatic"


def test_an_automatic_pace_follows_what_is_measured():
    pace = CheckpointSchedule.begin(Every(auto=True), 0, now=0.0)
    assert pace.is_due(SHORTEST_INTERVAL)
    pace = pace.began(1, SHORTEST_INTERVAL).learned(Measured(2.0, 3.0, 10.0, 0))
    assert pace.seconds == pytest.approx(240, rel=0.02)
    assert not pace.is_due(SHORTEST_INTERVAL + 200)
    assert pace.is_due(SHORTEST_INTERVAL + 250)


def test_lock_is_free_after_use_though_a_process_forked_meanwhile_lives(tmp_path):
    """As a data loader's process does, which begins while a checkpoint is written."""
    storage = open_storage(str(tmp_path))
    with storage.lock(".lock"):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        other = os.open(tmp_path / ".lock", os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
