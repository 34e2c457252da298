"""`torchelastic logs`: print the output of a job's workers, by rank."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_OK, TorchElasticError

_DESCRIPTION = """\
Print the output of a job's workers, from its log files on this machine.
"""


def main(argv: Sequence[str]) -> int:
    """Run the `logs` command; return the exit code."""
    parser = terminal.parser_for_a_job("logs", _DESCRIPTION)
    parser.add_argument(
        "--rank", metavar="RANKS", help="show only these ranks, such as 0,2-3 (default: all)"
    )
    parser.add_argument(
        "--generation", type=int, metavar="N", help="show this generation (default: the last one)"
    )
    parser.add_argument(
        "--follow", "-f", action="store_true", help="print new output until the job ends"
    )
    parser.add_argument(
        "--lines", "-n", type=int, metavar="N", help="show the last N lines of each file"
    )
    parser.add_argument("--raw", action="store_true", help="print unchanged bytes, no prefixes")
    args = parser.parse_args(argv)
    # Imported here: the events are slow to import, and `--help` must be fast.
    from torchelastic.cli.commands import logs_text

    try:
        return logs_text.show_logs(
            args.job,
            args.id,
            logs_text.Wanted(
                ranks=logs_text.parse_ranks(args.rank),
                generation=args.generation,
                lines=args.lines,
                raw=args.raw,
            ),
            follow=args.follow,
        )
    except TorchElasticError as error:
        return terminal.refuse("logs", error)
    except KeyboardInterrupt:
        return EXIT_OK
