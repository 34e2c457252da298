"""`torchelastic events`: what happened in a job, line by line."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_OK, TorchElasticError

_DESCRIPTION = """\
Show what happened in a job, in the order of time, from the logs of all its agents that are here.
"""


def main(argv: Sequence[str]) -> int:
    """The `events` command; returns the exit code."""
    parser = terminal.parser_for_a_job("events", _DESCRIPTION)
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the job has ended")
    parser.add_argument("--json", action="store_true", help="for programs: the lines themselves")
    parser.add_argument("--all", action="store_true", help="how far workers are, too")
    args = parser.parse_args(argv)
    from torchelastic.cli.commands import (
        events_text,  # the events are slow to import: not for --help
    )

    try:
        return events_text.show_events(
            args.job, args.id, follow=args.follow, as_data=args.json, everything=args.all
        )
    except TorchElasticError as error:
        return terminal.refuse("events", error)
    except KeyboardInterrupt:
        return EXIT_OK
