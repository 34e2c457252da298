"""A process that holds TCPStores for the agent, which itself never imports torch.

It reads one request a line on standard input and answers each with a line on standard output:

    open         a fresh, unused store; the answer is its port
    close PORT   the store is not needed any more; the answer is `closed`

It ends with its standard input.
"""

from __future__ import annotations

import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from torchelastic.system import linux
from torchelastic.worker import worker_stores


def serve() -> None:
    """Answer requests until the agent is gone."""
    linux.block_signals_for_agent()
    stores: dict[int, TCPStore] = {}
    for line in sys.stdin:
        verb, _, port = line.strip().partition(" ")
        if verb == "open":
            store = worker_stores.serve()
            stores[store.port] = store
            print(store.port, flush=True)
        elif verb == "close":
            stores.pop(int(port), None)
            print("closed", flush=True)


if __name__ == "__main__":
    serve()
