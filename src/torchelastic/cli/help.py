"""The text of `--help` of every command."""

from __future__ import annotations

import os
import textwrap

from torchelastic.cli.command_table import Command
from torchelastic.cli.flags import FLAGS
from torchelastic.config.flag import GROUPS, HELP, Flag

_INDENT = 24
_ELASTIC = "Workers that crash are restarted, and nodes may fail, leave and join."
_AS_RUN = """\
All flags of `torchelastic run` are accepted, too: `torchelastic run --help` lists them."""
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


def help_text(command: Command, width: int = 80) -> str:
    """Return the whole help, wrapped to `width`."""
    if command.launches and not command.own_flags:
        return _launcher_help(command, width)
    entries = []
    if command.argument:
        entries = [_row(command.argument.strip("[]"), command.argument_help, width)]
    entries += [_entry(flag, command, width) for flag in (*command.own_flags, HELP)]
    parts = [
        f"usage: {command.usage}",
        textwrap.fill(command.about, width),
        "\n".join(line for entry in entries for line in entry),
        *([textwrap.fill(_AS_RUN, width)] if command.launches else []),
        *(_paragraph(text, width) for text in command.epilog.splitlines()),
    ]
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str, width: int) -> str:
    """Wrap a paragraph; a long example gets backslashes, so that it can be pasted."""
    if not text.startswith("Example: "):
        return textwrap.fill(text, width)
    lines = textwrap.wrap(text, width - 2, subsequent_indent="    ", break_on_hyphens=False)
    return " \\\n".join(lines)


def _launcher_help(command: Command, width: int) -> str:
    """Return the help of `run` and its like: all flags of a launch, by group."""
    parts = [
        f"usage: {command.usage}",
        textwrap.fill(f"{command.about} {_ELASTIC}", width),
        *(_group(group, command, width) for group in GROUPS),
        textwrap.fill(_CLOSING, width),
        _EXAMPLES.format(prog=command.prog),
    ]
    return "\n\n".join(parts)


def terminal_width() -> int:
    """Return the terminal's width, limited to 80 to 100 columns."""
    try:
        columns = os.get_terminal_size().columns
    except OSError:  # a pipe or a file
        return 80
    return max(80, min(columns, 100))


def default_words(flag: Flag, command: Command) -> str:
    """Return the default for the help; empty if there is none to show."""
    if flag.is_switch:
        return ""
    text = command.default(flag)
    return flag.default_words if flag.default_words and text == flag.default else text


def spellings(flag: Flag) -> str:
    """`-r, --redirects STREAMS`."""
    short = f"{flag.short}, " if flag.short else ""
    return f"{short}{flag.name} {flag.metavar}".rstrip()


def _group(group: str, command: Command, width: int) -> str:
    flags = [flag for flag in FLAGS if flag.group == group]
    lines = [f"{group}:"]
    for flag in flags:
        if not flag.ignored:
            lines += _entry(flag, command, width)
    ignored = [flag.name for flag in flags if flag.ignored]
    if ignored:
        text = f"Flags of Bagua, accepted and ignored: {', '.join(ignored)}."
        lines += textwrap.wrap(
            text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
    return "\n".join(lines)


def _entry(flag: Flag, command: Command, width: int) -> list[str]:
    default = default_words(flag, command)
    # Keep "(default:" and its value on one line.
    text = f"{flag.help} (default:\0{default})" if default else flag.help
    return _row(spellings(flag), text, width)


def _row(name: str, text: str, width: int) -> list[str]:
    """Return the name in the left column and the text in the right one."""
    lines = [
        line.replace("\0", " ")
        for line in textwrap.wrap(text, width - _INDENT, break_on_hyphens=False)
    ]
    head = f"  {name}"
    below = [" " * _INDENT + line for line in lines]
    if len(head) > _INDENT - 2:
        return [head, *below]
    return [f"{head:<{_INDENT}}{lines[0]}", *below[1:]]
