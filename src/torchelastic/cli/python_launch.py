"""A launch from Python, with the functions of torch's launcher: it raises instead of exiting."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torchelastic import env
from torchelastic.cli.command_table import Command
from torchelastic.cli.parser import ARGUMENT, DEFAULT, Parsed, parse, set_variables
from torchelastic.config import Entry, LaunchConfig, values
from torchelastic.config.flag import HELP, Flag, convert
from torchelastic.errors import EXIT_OK, TorchElasticError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

#: As in torch: all other values of its namespace are text.
_TYPES: dict[Any, type] = {values.whole: int, values.seconds: float}


def main(command: Command, argv: Sequence[str] | None) -> None:
    """Run the job of a command line; return when it has succeeded, and raise if it has not."""
    parsed = parse(sys.argv[1:] if argv is None else argv, command, env.snapshot())
    if parsed["help"]:
        from torchelastic.cli.help import help_text, terminal_width

        print(help_text(command, terminal_width()), end="")
        return
    if env.get("TORCHELASTIC_ERROR_FILE"):  # a launcher is to be told what failed
        record = importlib.import_module("torch.distributed.elastic.multiprocessing.errors").record
        record(run)(parsed)
    else:
        run(parsed)


def run(parsed: Parsed) -> None:
    """Run a job; raise if it has not succeeded, like `torchelastic.launcher.launch_agent`."""
    from torchelastic.cli.commands import run as command

    exitcode = command.main(parsed, _in_agent_process)
    if exitcode != EXIT_OK:  # from --hosts, which has printed the reason
        raise TorchElasticError(f"The job ended with exit code {exitcode}.")


def config_and_command(parsed: Parsed) -> tuple[LaunchConfig, str, list[str]]:
    """Return what `elastic_launch(config, entrypoint)(*args)` needs to run the job."""
    from torchelastic.cli.commands.run import job

    config, entry = job(parsed, env.snapshot())
    if entry.kind == "program":
        return config, entry.target, list(entry.args)
    as_module = ["-m"] if entry.kind == "module" else []
    return config, sys.executable, ["-u", *as_module, entry.target, *entry.args]


def _in_agent_process(config: LaunchConfig, entry: Entry) -> int:
    from torchelastic.launcher.launch_job import private_directory, run_entry

    with private_directory() as directory:
        ended = run_entry(config, entry, directory)
    if ended.exitcode != EXIT_OK:
        raise ended.error(entry.name)
    return EXIT_OK


# --- as an `argparse` parser, which torch's launcher has ----------------------------------------


def arguments_parser(command: Command, environ: Mapping[str, str]) -> ArgumentParser:
    """Return a parser of the command's flags; as in torch, variables set their defaults."""
    from argparse import REMAINDER, ArgumentParser

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
