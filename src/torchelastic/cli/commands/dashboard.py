"""`torchelastic dashboard`: show a job in the browser."""

from __future__ import annotations

import asyncio

from torchelastic.cli import terminal
from torchelastic.cli.parser import Parsed
from torchelastic.dashboard import page_server
from torchelastic.dashboard.job_state import StateReader
from torchelastic.errors import EXIT_OK, ConfigError
from torchelastic.events.analysis.find_job import choose
from torchelastic.system import linux


def main(parsed: Parsed) -> int:
    """Serve the page until Ctrl-C; return the exit code."""
    address = parsed["address"]
    token = page_server.load_token(parsed["token_file"], "--token-file")
    pictures = StateReader(choose(parsed.argument, parsed["job"]))
    pictures.look()  # report errors here, not in the browser
    linux.give_way()
    try:
        return asyncio.run(page_server.serve(pictures, address, token, _show))
    except OSError as error:
        raise ConfigError(
            f"Cannot listen at {address} ({error.strerror or error}): use another --address."
        ) from None
    except KeyboardInterrupt:
        return EXIT_OK
    finally:
        pictures.close()


def _show(url: str) -> None:
    terminal.show(f"{url}  (Ctrl-C to stop)")
