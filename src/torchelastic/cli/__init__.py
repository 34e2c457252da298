"""Command line: turn argv into a job, or into a query about one.

command_table  every command with its flags; flags: those of a launch, most of them settings of
               `config.LaunchConfig`
parser         argv and PET_* variables to values -> planned_job (LaunchConfig, Entry) -> checks
help           the text of `--help`; completion: shell completion; reference: pages of the docs
commands/      the code of the commands, imported only to run it, so that `--help` is fast; none
               imports torch
python_launch  a launch from Python, with the functions of torch's launcher
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module

from torchelastic.errors import EXIT_OK, EXIT_SIGNAL_BASE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchelastic.cli.command_table import Command

#: Name and summary of every command; `command_table` has their flags.
COMMANDS = {
    "run": "run a script in every worker of an elastic job",
    "status": "show the jobs of this machine",
    "top": "watch a job in the terminal",
    "dashboard": "show a job in the browser",
    "events": "print the events of a job",
    "logs": "print the output of a job's workers",
    "stacks": "print the current stack of each rank",
    "skipped": "print the samples of steps with bad numbers",
    "trace": "export a job as a trace for Perfetto",
    "doctor": "check this machine and a launch before a long run",
    "submit slurm": "submit a job to Slurm",
    "submit ray": "run a job on the nodes of a Ray cluster",
    "submit runai": "submit a job to Run:ai",
    "submit kubernetes": "submit a job to a Kubernetes cluster",
    "scale": "change the number of nodes of a job on Kubernetes",
    "delete": "end a job on Kubernetes and remove it",
    "operator": "run the controller of ElasticJobs on Kubernetes",
    "rendezvous serve": "host the rendezvous in its own process",
}

_HELP = """\
usage: torchelastic COMMAND ...

Elastic, fault-tolerant PyTorch training.

Commands:
{commands}

For details, run `torchelastic COMMAND --help`. `torchelastic --version` prints the version,
`torchelastic --print-completion SHELL` a completion script for bash, zsh or tcsh.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `torchelastic` program; return the exit code. Ctrl-C ends it without a traceback."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return interrupted()


def run_program(name: str, argv: Sequence[str] | None) -> int:
    """Run a module entry point with the flags of `run`; `name` is in `command_table`."""
    try:
        from torchelastic.cli import command_table

        command: Command = getattr(command_table, name)
        return _perform(command, sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return interrupted()


def interrupted() -> int:
    """Return the exit code after Ctrl-C; ignore a second one, from a parent that passes it on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return EXIT_SIGNAL_BASE + signal.SIGINT


def _main(words: list[str]) -> int:
    first = words[0] if words else "--help"
    if first in ("-h", "--help", "help"):
        print(_HELP.format(commands=_rows("")), end="")
        return EXIT_OK
    if first in ("-V", "--version"):
        from torchelastic import __version__

        print(f"torchelastic {__version__}")
        return EXIT_OK
    if first.partition("=")[0] == "--print-completion":
        words = ["run", *words]
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            from torchelastic.cli.command_table import BY_NAME

            return _perform(BY_NAME[name], words[length:])
    return _no_such_command(first, words[1:])


def _perform(command: Command, argv: Sequence[str]) -> int:
    """Parse the arguments and run the command; print what is wrong with them."""
    from torchelastic import env
    from torchelastic.cli.parser import parse
    from torchelastic.errors import ConfigError

    try:
        parsed = parse(argv, command, env.snapshot())
        if parsed["help"]:
            from torchelastic.cli.help import help_text, terminal_width

            print(help_text(command, terminal_width()), end="")
            return EXIT_OK
        module, _, function = command.code.partition(".")
        perform = getattr(import_module(f"torchelastic.cli.commands.{module}"), function)
        return int(perform(parsed))
    except ConfigError as error:
        from torchelastic.cli import terminal

        return terminal.refuse(command.prog, str(error))


def _no_such_command(first: str, rest: list[str]) -> int:
    from torchelastic.cli import terminal

    seconds = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{first} ")]
    if seconds and rest[:1] in (["-h"], ["--help"]):
        print(f"usage: torchelastic {first} COMMAND ...\n\nCommands:\n{_rows(first)}")
        return EXIT_OK
    if seconds:
        write = f"write torchelastic {first} {_or(seconds)}."
        wrong = f"Unknown command '{first} {rest[0]}'" if rest else f"'{first}' is incomplete"
        return terminal.refuse("torchelastic", f"{wrong}: {write}")
    if first.startswith("-"):
        write = f"flags follow a command, as in torchelastic run {first}."
        return terminal.refuse("torchelastic", f"Unknown flag {first}: {write}")
    return terminal.refuse("torchelastic", f"Unknown command '{first}': {_hint(first)}")


def _rows(first: str) -> str:
    """Return the commands that begin with a word, with their summaries."""
    found = [row for row in COMMANDS.items() if row[0].startswith(first)]
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:{width}}  {summary}" for name, summary in found)


def _hint(command: str) -> str:
    if command.endswith(".py"):
        return f"write torchelastic run {command}."
    from difflib import get_close_matches  # only needed for an error

    firsts = list(dict.fromkeys(name.partition(" ")[0] for name in COMMANDS))
    if near := get_close_matches(command, firsts, n=1):
        return f"did you mean {near[0]}?"
    return f"write {_or(firsts)}."


def _or(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
