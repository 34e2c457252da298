"""`python -m torchelastic.dashboard JOB NODE ADDRESS [TOKEN_FILE]`: the page of an agent's.

Its first line on standard output, a JSON object, says where the page is, or why it is not. It ends
when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from torchelastic.dashboard import start
from torchelastic.dashboard.job_state import Pictures
from torchelastic.errors import EXIT_FAILED, TorchElasticError
from torchelastic.events.analysis.find_job import choose


def main() -> int:
    job, node, address, *files = sys.argv[1:]
    logging.basicConfig(format="[torchelastic dashboard] %(message)s", level=logging.WARNING)
    try:
        token = start.load_token(next(iter(files), None), "--dashboard-token-file")
        pictures = Pictures(choose(job), node)
        return asyncio.run(start.serve(pictures, address, token, _found, until=0))
    except (TorchElasticError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        _tell({"error": reason})
        return EXIT_FAILED


def _found(url: str) -> None:
    _tell({"url": url})


def _tell(said: dict[str, str]) -> None:
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    sys.exit(main())
