"""The catalog: whose turn it is, which checkpoints count, and which are removed."""

from __future__ import annotations

import fsspec
import pytest

from torchelastic.checkpoint.catalog import Catalog, Fenced, name_of
from torchelastic.checkpoint.fence import Fence
from torchelastic.checkpoint.marker import History, Marker
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
