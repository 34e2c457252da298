"""The tested versions of torch, and the messages about other versions."""

import re
from pathlib import Path

import pytest

from torchelastic import torch_versions
from torchelastic.torch_versions import too_new, too_old

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    ("version", "old", "new"),
    [
        ("1.13.1", True, False),
        ("2.8.0+cu128", True, False),
        ("2.9.0a0+git1", False, False),
        ("2.9.1", False, False),
        ("2.10.0", False, False),
        ("2.15.0+cpu", False, False),
        ("2.15.2", False, False),
        ("2.16.0a0+nv26.11", False, True),
        ("3.0.0", False, True),
        ("built at home", False, False),
        ("", False, False),
    ],
)
def test_only_versions_outside_the_range_get_a_message(version, old, new):
    assert (bool(too_old(version)), bool(too_new(version))) == (old, new)


def test_the_sentences_name_the_versions():
    assert too_old("2.6.0") == "torch is 2.6.0; torchelastic needs 2.9 or later: upgrade torch."
    assert "torch 2.16.0 is newer than the versions" in too_new("2.16.0")
    assert "(2.9, 2.13 and 2.15)" in too_new("2.16.0")


def test_pyproject_has_the_same_versions():
    text = PROJECT.read_text()
    oldest = torch_versions.in_words(torch_versions.RUN[:1])
    assert f'dependencies = ["torch>={oldest}"' in text
    (said,) = re.findall(r"^# Run on torch (.*);", text, re.MULTILINE)
    assert said == torch_versions.in_words()
