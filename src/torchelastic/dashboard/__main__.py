"""`python -m torchelastic.dashboard JOB NODE ADDRESS [TOKEN_FILE]`: the dashboard of an agent.

Its first line on stdout is a JSON object with the URL of the page, or the error. It ends when its
stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from torchelastic.dashboard import page_server
from torchelastic.dashboard.job_state import StateReader
from torchelastic.errors import EXIT_FAILED, TorchElasticError
from torchelastic.events.analysis.find_job import choose


def main() -> int:
    job, node, address, *files = sys.argv[1:]
    logging.basicConfig(format="[torchelastic dashboard] %(message)s", level=logging.WARNING)
    try:
        token = page_server.load_token(next(iter(files), None), "--dashboard-token-file")
        reader = StateReader(choose(job), node)
        return asyncio.run(page_server.serve(reader, address, token, _print_url, until=0))
    except (TorchElasticError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        _print({"error": reason})
        return EXIT_FAILED


def _print_url(url: str) -> None:
    _print({"url": url})


def _print(result: dict[str, str]) -> None:
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
