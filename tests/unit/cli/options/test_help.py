"""The help of every command, generated from the same table as the reference pages."""

import pytest

from torchelastic.cli.options.command_table import BY_NAME, DISTRIBUTED_LAUNCH, LAUNCHERS, RUN
from torchelastic.cli.options.flag import GROUPS
from torchelastic.cli.options.flags import FLAGS
from torchelastic.cli.options.help import help_text


@pytest.mark.parametrize("defaults", LAUNCHERS, ids=lambda defaults: defaults.prog)
def test_help_names_every_flag_and_fits(defaults):
    for width in (80, 100):
        text = help_text(defaults, width)
        assert all(f"\n{group}:\n" in text for group in GROUPS)
        assert all(flag.name in text for flag in FLAGS)
        prose, _, _ = text.partition("\nExamples:\n")
        assert max(map(len, prose.splitlines())) <= width
        assert "\0" not in text


@pytest.mark.parametrize("command", BY_NAME.values(), ids=BY_NAME)
def test_help_of_a_command_names_its_own_flags_and_fits(command):
    for width in (80, 100):
        text = help_text(command, width)
        assert all(f"{flag.name} " in text for flag in command.own_flags)
        assert not command.argument or f"\n  {command.argument.strip('[]')} " in text
        prose, _, _ = text.partition("\nExamples:\n")
        assert max(map(len, prose.splitlines())) <= width
        assert text.endswith("\n")
        assert not text.endswith("\n\n")


def test_help_shows_the_commands_own_defaults():
    assert "(default: 100)" in help_text(RUN)
    launch = help_text(DISTRIBUTED_LAUNCH)
    assert "(default: auto)" in launch
    assert "(default: 100)" not in launch
