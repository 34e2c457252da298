"""`torchelastic status`: the live and recent jobs of this machine, or the one in a directory."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_OK, TorchElasticError

_DESCRIPTION = """\
Show the jobs of this machine: nodes, generation, workers, step, goodput, what the last failure
cost, and what changed last and why.
"""


def main(argv: Sequence[str]) -> int:
    """The `status` command; returns the exit code."""
    parser = terminal.parser_for_a_job("status", _DESCRIPTION, default="all of this machine")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(argv)
    from torchelastic.cli.commands import (
        status_text,  # the events are slow to import: not for --help
    )

    try:
        terminal.show(status_text.answer(args.job, args.id, as_data=args.json))
    except TorchElasticError as error:
        return terminal.refuse("status", error)
    return EXIT_OK
