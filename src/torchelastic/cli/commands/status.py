"""`torchelastic status`: show the live and recent jobs of this machine, or one job."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_OK, TorchElasticError

_DESCRIPTION = """\
Show the jobs of this machine: nodes, generation, workers, step, goodput, the cost of the last
failure, and the last change and its cause.
"""


def main(argv: Sequence[str]) -> int:
    """Run the `status` command; return the exit code."""
    parser = terminal.parser_for_a_job("status", _DESCRIPTION, default="all jobs of this machine")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    # Imported here: the events are slow to import, and `--help` must be fast.
    from torchelastic.cli.commands import status_text

    try:
        terminal.show(status_text.answer(args.job, args.id, as_data=args.json))
    except TorchElasticError as error:
        return terminal.refuse("status", error)
    return EXIT_OK
