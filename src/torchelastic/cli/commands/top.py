"""`torchelastic top`: a job as it goes, on the whole screen."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_OK, ConfigError, TorchElasticError

_DESCRIPTION = """\
Watch a job: its nodes and ranks, how far and how fast they are, what happened last, and what
failures have cost. Ends with the job, or with Ctrl-C.
"""


def main(argv: Sequence[str]) -> int:
    """The `top` command; returns the exit code."""
    parser = terminal.parser_for_a_job("top", _DESCRIPTION)
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    args = parser.parse_args(argv)
    try:
        _check_rich()
        from torchelastic.cli.commands.top_screen import watch

        return watch(args.job, args.id, once=args.once)
    except TorchElasticError as error:
        return terminal.refuse("top", error)
    except KeyboardInterrupt:
        return EXIT_OK


def _check_rich() -> None:
    if find_spec("rich") is None:
        raise ConfigError(
            "This needs the package rich: pip install 'torchelastic[top]'. `torchelastic status "
            "JOB` shows much of it, once."
        )
