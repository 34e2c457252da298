"""`torchelastic events`: print the events of a job."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_OK, TorchElasticError

_DESCRIPTION = """\
Print the events of a job in order of time, from all event logs of its agents on this machine.
"""


def main(argv: Sequence[str]) -> int:
    """Run the `events` command; return the exit code."""
    parser = terminal.parser_for_a_job("events", _DESCRIPTION)
    parser.add_argument(
        "--follow", "-f", action="store_true", help="print new events until the job ends"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON lines of the log")
    parser.add_argument("--all", action="store_true", help="include the progress of workers")
    args = parser.parse_args(argv)
    # Imported here: the events are slow to import, and `--help` must be fast.
    from torchelastic.cli.commands import events_text

    try:
        return events_text.show_events(
            args.job, args.id, follow=args.follow, as_data=args.json, everything=args.all
        )
    except TorchElasticError as error:
        return terminal.refuse("events", error)
    except KeyboardInterrupt:
        return EXIT_OK
