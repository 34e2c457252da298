"""Command line: turn argv into a job, or into a query about one.

options/   parser (argv and PET_* -> values) -> launch_config (LaunchConfig, Entry) -> checks
commands/  one module per command, imported on use; none imports torch, so that `--help` is fast
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module

from torchelastic.errors import EXIT_OK, EXIT_SIGNAL_BASE, EXIT_USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchelastic.cli.options.command_defaults import CommandDefaults

#: Each is a module of `commands` with a `main`.
_COMMANDS = (
    "run",
    "status",
    "top",
    "dashboard",
    "events",
    "logs",
    "stacks",
    "trace",
    "doctor",
    "rendezvous",
)

_HELP = """\
usage: torchelastic COMMAND ...

Elastic, fault-tolerant PyTorch training.

Commands:
  run               run a script in every worker of an elastic job
  status            show the jobs of this machine
  top               watch a job in the terminal
  dashboard         show a job in the browser
  events            print the events of a job
  logs              print the output of its workers
  stacks            print the current stack of each rank
  trace             export a job as a trace for Perfetto
  doctor            check this machine and a launch before a long run
  rendezvous serve  host the rendezvous in its own process

For details, run `torchelastic COMMAND --help`. `torchelastic --version` prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `torchelastic` program; return the exit code. Ctrl-C ends it without a traceback."""
    try:
        return _main(*((sys.argv[1:] if argv is None else argv) or ["--help"]))
    except KeyboardInterrupt:
        return interrupted()


def run_program(defaults: str, argv: Sequence[str] | None) -> int:
    """Run a module entry point with the flags of `run`; `defaults` names its defaults."""
    try:
        from torchelastic.cli.commands import run
        from torchelastic.cli.options import command_defaults

        chosen: CommandDefaults = getattr(command_defaults, defaults)
        return run.main(sys.argv[1:] if argv is None else argv, chosen)
    except KeyboardInterrupt:
        return interrupted()


def interrupted() -> int:
    """Return the exit code after Ctrl-C; ignore a second one, from a parent that passes it on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return EXIT_SIGNAL_BASE + signal.SIGINT


def _main(command: str, *rest: str) -> int:
    if command in _COMMANDS:
        return int(import_module(f"torchelastic.cli.commands.{command}").main(list(rest)))
    if command in ("-h", "--help", "help"):
        print(_HELP, end="")
        return EXIT_OK
    if command in ("-V", "--version"):
        from torchelastic import __version__

        print(f"torchelastic {__version__}")
        return EXIT_OK
    print(f"torchelastic: error: {_unknown(command)}", file=sys.stderr)
    return EXIT_USAGE


def _unknown(command: str) -> str:
    if command.endswith(".py"):
        return f"Unknown command '{command}': write torchelastic run {command}."
    from difflib import get_close_matches  # only needed for an error

    if near := get_close_matches(command, _COMMANDS, n=1):
        return f"Unknown command '{command}': did you mean {near[0]}?"
    *others, last = _COMMANDS
    return f"Unknown command '{command}': write {', '.join(others)} or {last}."
