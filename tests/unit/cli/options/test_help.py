"""The help and the reference pages, generated from the same table."""

from pathlib import Path

import pytest

from torchelastic.cli.options.command_defaults import DISTRIBUTED_LAUNCH, JOB_COMMANDS, RUN
from torchelastic.cli.options.flag import GROUPS
from torchelastic.cli.options.flags import FLAGS
from torchelastic.cli.options.help import help_text
from torchelastic.cli.reference import PAGES

DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.parametrize("defaults", JOB_COMMANDS, ids=lambda defaults: defaults.prog)
def test_help_names_every_flag_and_fits(defaults):
    for width in (80, 100):
        text = help_text(defaults, width)
        assert all(f"\n{group}:\n" in text for group in GROUPS)
        assert all(flag.name in text for flag in FLAGS)
        prose, _, _ = text.partition("\nExamples:\n")
        assert max(map(len, prose.splitlines())) <= width
        assert "\0" not in text


def test_help_shows_the_commands_own_defaults():
    assert "(default: 100)" in help_text(RUN)
    launch = help_text(DISTRIBUTED_LAUNCH)
    assert "(default: auto)" in launch
    assert "(default: 100)" not in launch


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_current(name):
    written = (DOCS / name).read_text()
    assert written == PAGES[name](), "run: python -m torchelastic.cli.reference docs"
