"""The flags of a launcher for Python callers: an `argparse` parser, as torch's launcher has it."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from torchelastic.cli.options import values
from torchelastic.cli.options.command import Command
from torchelastic.cli.options.flag import HELP, Flag
from torchelastic.cli.options.parser import ARGUMENT, DEFAULT, Parsed, convert, set_variables

#: As in torch: all other values of its namespace are text.
_TYPES: dict[Any, type] = {values.whole: int, values.seconds: float}


def arguments_parser(command: Command, environ: Mapping[str, str]) -> ArgumentParser:
    """Return a parser of the command's flags; as in torch, variables set their defaults."""
    parser = ArgumentParser(prog=command.prog, description=command.about)
    texts = {flag.dest: environ[name] for flag, name in set_variables(command.flags, environ)}
    for flag in command.flags:
        if flag is not HELP:
            _add(parser, flag, texts.get(flag.dest, command.default(flag)))
    parser.add_argument("training_script", help="The script, module or program to run.")
    parser.add_argument("training_script_args", nargs=REMAINDER, help="Its arguments.")
    return parser


def _add(parser: ArgumentParser, flag: Flag, default: str) -> None:
    spellings = dict.fromkeys((flag.name, f"--{flag.dest}"))
    names = [flag.short, *spellings] if flag.short else [*spellings]
    options: dict[str, Any] = {"dest": flag.dest, "help": flag.help.replace("%", "%%")}
    if flag.is_switch:
        parser.add_argument(
            *names, action="store_true", default=convert(flag, flag.name, default), **options
        )
        return
    options["default"] = default if flag.convert(default) is not None else None
    options["metavar"] = flag.metavar
    if flag.alone:
        options.update(nargs="?", const=flag.alone)
    parser.add_argument(*names, type=_TYPES.get(flag.convert, str), **options)


def parsed_from(args: Namespace, command: Command) -> Parsed:
    """Return the flags of a namespace, from this parser or torch's. A value that differs from the
    default counts as given."""
    found, strength = {}, {}
    for flag in command.flags:
        default = flag.convert(command.default(flag))
        value = getattr(args, flag.dest, None)
        found[flag.dest] = default if value is None else convert(flag, flag.name, _text(value))
        strength[flag.dest] = ARGUMENT if found[flag.dest] != default else DEFAULT
    script = getattr(args, "training_script", None)
    words = (script, *args.training_script_args) if script else ()
    return Parsed(command.prog, found, strength, words)


def _text(value: Any) -> str:
    """Return a value of a namespace as it would be on a command line.

    >>> _text(True), _text(2), _text(["a,b", "c"])
    ('1', '2', 'a,,b,c')
    """
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, list | tuple):
        return ",".join(str(item).replace(",", ",,") for item in value)
    return str(value)
