"""`torchelastic dashboard`: a page in the browser that shows a job."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.cli.commands import terminal
from torchelastic.cli.options import values
from torchelastic.errors import EXIT_OK, ConfigError, TorchElasticError

_DESCRIPTION = """\
Show a job in the browser, while it runs or when it has ended. Ends with Ctrl-C.
"""


def main(argv: Sequence[str]) -> int:
    """The `dashboard` command; returns the exit code."""
    parser = terminal.parser_for_a_job("dashboard", _DESCRIPTION)
    parser.add_argument(
        "--address",
        metavar="[HOST:]PORT",
        default="auto",
        help="where to listen; on this machine only without HOST (default: 29480, or a free port)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="what browsers have to show; made up where other machines can reach the page",
    )
    args = parser.parse_args(argv)
    try:
        return _serve(args.job, args.id, _address(args.address), args.token_file)
    except TorchElasticError as error:
        return terminal.refuse("dashboard", error)
    except KeyboardInterrupt:
        return EXIT_OK


def _address(given: str) -> str:
    try:
        return values.page(given)
    except ConfigError as error:
        raise ConfigError(f"--address {error}") from None


def _serve(wanted: str | None, job: str | None, address: str, token_file: str | None) -> int:
    # Imported here: `--help` is quick.
    import asyncio

    from torchelastic.dashboard import start
    from torchelastic.dashboard.job_state import StateReader
    from torchelastic.events.analysis.find_job import choose
    from torchelastic.system import linux

    token = start.load_token(token_file, "--token-file")
    pictures = StateReader(choose(wanted, job))
    pictures.look()  # what is wrong with it is said here, not in the browser
    linux.give_way()
    try:
        return asyncio.run(start.serve(pictures, address, token, _show))
    except OSError as error:
        raise ConfigError(
            f"The page cannot be at {address} ({error.strerror or error}): give another --address."
        ) from None
    finally:
        pictures.close()


def _show(url: str) -> None:
    terminal.show(f"{url}  (Ctrl-C to end)")
