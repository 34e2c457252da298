"""The position of a training, and how frameworks are found."""

import random
import subprocess
import sys

import pytest

from torchelastic.integrations import frameworks
from torchelastic.integrations.position import Skip, batches_done


@pytest.mark.parametrize(
    ("done", "before", "now", "multiple", "expected"),
    [
        (7, 2, 2, 1, 7),
        (7, 2, 1, 1, 14),
        (7, 1, 2, 1, 3),
        (1, 1, 2, 1, 0),
        (9, 4, 3, 1, 12),
        (10, 4, 3, 1, 13),
        (10, 4, 3, 4, 12),
        (7, 2, 2, 4, 7),  # the last step of an epoch may have fewer batches
    ],
)
def test_batches_in_a_world_of_another_size(done, before, now, multiple, expected):
    assert batches_done(done, before=before, now=now, multiple=multiple) == expected


def test_no_sample_is_left_out_by_a_resize():
    for before in range(1, 8):
        for now in range(1, 8):
            for done in range(20):
                again = done * before - batches_done(done, before=before, now=now) * now
                assert 0 <= again < now


def test_one_pass_begins_in_the_middle_and_the_next_does_not():
    behind = []
    skip = Skip([[1], [2], [3]], 2, lambda: behind.append("skipped"))
    assert len(skip) == 3
    iter(skip)
    iterator = iter(skip)  # loaders with worker processes do so
    assert behind == []
    assert next(iterator) == [3]
    assert behind == ["skipped"]
    assert list(iterator) == []
    assert list(skip) == [[1], [2], [3]]
    assert behind == ["skipped"]


def test_an_order_is_drawn_when_it_would_be_drawn_without():
    class Shuffled:
        def __iter__(self):
            yield from random.sample(range(5), 5)

    random.seed(1)
    plain = iter(Shuffled())
    random.random()
    expected = list(plain)
    random.seed(1)
    skipping = iter(Skip(Shuffled(), 2, lambda: None))
    random.random()
    assert list(skipping) == expected[2:]


def test_skip_passes_other_attributes_of_the_sampler():
    class Batches(list):
        batch_size = 4

    assert Skip(Batches(), 0, lambda: None).batch_size == 4


# --- frameworks ----------------------------------------------------------------------------------


def test_a_module_that_is_there():
    assert frameworks.find("no_such_thing.at_all", "json.decoder") is sys.modules["json.decoder"]


def test_a_missing_one_is_named_with_what_to_do():
    with pytest.raises(ModuleNotFoundError) as caught:
        frameworks.find("no_such_thing.pytorch", "nor_this")
    assert str(caught.value) == (
        "This integration needs no_such_thing, which is not installed: pip install no_such_thing."
    )


def test_one_that_lacks_something_itself_says_what(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)
    assert frameworks.find("lacking", "json") is sys.modules["json"], "imported already"
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_thing'"):
        frameworks.find("lacking")


def test_packages_import_nothing_heavy_that_nobody_has_asked_for():
    code = (
        "import sys, torchelastic.integrations, torchelastic.distributed as d; dir(d)\n"
        "import torchelastic.metrics, torchelastic.metrics.prometheus\n"
        "print(sys.modules.keys() & {'torch', 'prometheus_client'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == "set()\n", done.stderr
