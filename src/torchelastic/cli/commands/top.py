"""`torchelastic top`: watch a job in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_OK, ConfigError, TorchElasticError

_DESCRIPTION = """\
Watch a job: its nodes and ranks, their step and speed, the latest events, and the cost of failures.
Ends with the job, or with Ctrl-C.
"""


def main(argv: Sequence[str]) -> int:
    """Run the `top` command; return the exit code."""
    parser = terminal.parser_for_a_job("top", _DESCRIPTION)
    parser.add_argument("--once", action="store_true", help="print once and exit")
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
            "The package rich is not installed: run pip install 'torchelastic[top]'. Without it, "
            "`torchelastic status JOB` prints most of the same, once."
        )
