"""`torchelastic rendezvous serve`: host the rendezvous in its own process."""

from __future__ import annotations

import sys

from torchelastic.cli.parser import Parsed
from torchelastic.config import LaunchConfig
from torchelastic.errors import EXIT_OK, EXIT_RENDEZVOUS_LOST, RendezvousLost
from torchelastic.rendezvous.embedded import service


def serve(parsed: Parsed) -> int:
    """Serve until a signal; return the exit code."""
    config = LaunchConfig(
        run_id=parsed["rdzv_id"],
        rdzv_endpoint=parsed["endpoint"],
        rdzv_secret_file=parsed["rdzv_secret_file"],
        rdzv_tls_cert=parsed["rdzv_tls_cert"],
        rdzv_tls_key=parsed["rdzv_tls_key"],
        rdzv_tls_ca=parsed["rdzv_tls_ca"],
    )
    try:
        service.run(config, parsed["endpoint"], parsed["state_file"])
    except RendezvousLost as error:
        print(f"{parsed.prog}: {error}", file=sys.stderr)
        return EXIT_RENDEZVOUS_LOST
    return EXIT_OK
