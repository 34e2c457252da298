"""`torchelastic dashboard`: show a job in the browser."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.cli.commands import terminal
from torchelastic.cli.options import values
from torchelastic.errors import EXIT_OK, ConfigError, TorchElasticError

_DESCRIPTION = """\
Serve a web page that shows a running or ended job. Stop it with Ctrl-C.
"""


def main(argv: Sequence[str]) -> int:
    """Run the `dashboard` command; return the exit code."""
    parser = terminal.parser_for_a_job("dashboard", _DESCRIPTION)
    parser.add_argument(
        "--address",
        metavar="[HOST:]PORT",
        default="auto",
        help="where to listen; loopback only without HOST (default: 29480, or a free port)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token that browsers must send (default: generated unless HOST is "
        "loopback)",
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
    # Imported here: `--help` must be fast.
    import asyncio

    from torchelastic.dashboard import start
    from torchelastic.dashboard.job_state import StateReader
    from torchelastic.events.analysis.find_job import choose
    from torchelastic.system import linux

    token = start.load_token(token_file, "--token-file")
    pictures = StateReader(choose(wanted, job))
    pictures.look()  # report errors here, not in the browser
    linux.give_way()
    try:
        return asyncio.run(start.serve(pictures, address, token, _show))
    except OSError as error:
        raise ConfigError(
            f"Cannot listen at {address} ({error.strerror or error}): use another --address."
        ) from None
    finally:
        pictures.close()


def _show(url: str) -> None:
    terminal.show(f"{url}  (Ctrl-C to stop)")
