"""The text of `--help`, from the table in `flags`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator

from torchelastic.cli.options.command_defaults import CommandDefaults
from torchelastic.cli.options.flag import GROUPS, Flag
from torchelastic.cli.options.flags import FLAGS

_INDENT = 24
_EXAMPLES = """\
Examples:
  {prog} --nproc-per-node 4 train.py --lr 0.1
      One node, four workers.
  {prog} -j 1:4x8 --rdzv-endpoint node1:29400 train.py
      The same command on up to four nodes, with eight workers each; the job runs
      with the nodes that are available. node1 is one of them.
  {prog} -j 1x8 --log-dir logs --tee 3 -m my.trainer
      A module instead of a script; output to the console and to files.
"""
_CLOSING = """\
Names may use dashes or underscores and may be abbreviated. The variable PET_<NAME>
(PET_NNODES for --nnodes) sets a flag's default. Everything after SCRIPT is passed to the script;
${local_rank} in it is replaced with the worker's local rank."""


def help_text(defaults: CommandDefaults, width: int = 80) -> str:
    """Return the whole help, wrapped to `width`."""
    parts = [
        f"usage: {defaults.prog} [flags] SCRIPT [arguments]",
        textwrap.fill(_about(defaults), width),
        *(_group(group, defaults, width) for group in GROUPS),
        textwrap.fill(_CLOSING, width),
        _EXAMPLES.format(prog=defaults.prog),
    ]
    return "\n\n".join(parts)


def terminal_width() -> int:
    """Return the terminal's width, limited to 80 to 100 columns."""
    try:
        columns = os.get_terminal_size().columns
    except OSError:  # a pipe or a file
        return 80
    return max(80, min(columns, 100))


def default_words(flag: Flag, defaults: CommandDefaults) -> str:
    """Return the default for the help; empty if there is none to show."""
    if flag.is_switch:
        return ""
    text = defaults.default(flag)
    return flag.default_words if flag.default_words and text == flag.default else text


def spellings(flag: Flag) -> str:
    """`-r, --redirects STREAMS`."""
    short = f"{flag.short}, " if flag.short else ""
    return f"{short}{flag.name} {flag.metavar}".rstrip()


def _about(defaults: CommandDefaults) -> str:
    return f"{defaults.about} Workers that crash are restarted, and nodes may fail, leave and join."


def _group(group: str, defaults: CommandDefaults, width: int) -> str:
    flags = [flag for flag in FLAGS if flag.group == group]
    lines = [f"{group}:"]
    for flag in flags:
        if not flag.ignored:
            lines += _entry(flag, defaults, width)
    ignored = [flag.name for flag in flags if flag.ignored]
    if ignored:
        text = f"Flags of Bagua, accepted and ignored: {', '.join(ignored)}."
        lines += textwrap.wrap(
            text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
    return "\n".join(lines)


def _entry(flag: Flag, defaults: CommandDefaults, width: int) -> Iterator[str]:
    head = f"  {spellings(flag)}"
    default = default_words(flag, defaults)
    # Keep "(default:" and its value on one line.
    text = f"{flag.help} (default:\0{default})" if default else flag.help
    lines = [
        line.replace("\0", " ")
        for line in textwrap.wrap(text, width - _INDENT, break_on_hyphens=False)
    ]
    if len(head) > _INDENT - 2:
        yield head
    else:
        yield f"{head:<{_INDENT}}{lines.pop(0)}"
    for line in lines:
        yield " " * _INDENT + line
