"""`torchelastic logs`: what a job's workers wrote, by rank."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_OK, TorchElasticError

_DESCRIPTION = """\
Show what a job's workers wrote, from the files that --redirects and --tee make of it.
"""


def main(argv: Sequence[str]) -> int:
    """The `logs` command; returns the exit code."""
    parser = terminal.parser_for_a_job("logs", _DESCRIPTION)
    parser.add_argument("--rank", metavar="RANKS", help="as in 0,2-3 (default: all)")
    parser.add_argument("--generation", type=int, metavar="N", help="(default: the last one)")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the job has ended")
    parser.add_argument("--lines", "-n", type=int, metavar="N", help="the last N of each file")
    parser.add_argument("--raw", action="store_true", help="every byte, without prefixes")
    args = parser.parse_args(argv)
    from torchelastic.cli.commands import logs_text  # the events are slow to import: not for --help

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
