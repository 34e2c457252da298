"""`torchelastic rendezvous serve`: host the rendezvous in its own process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchelastic.config import DEFAULT_PORT, LaunchConfig
from torchelastic.errors import EXIT_OK, EXIT_RENDEZVOUS_LOST, EXIT_USAGE, ConfigError

_DESCRIPTION = """\
Host the rendezvous of jobs on a machine that does not train, such as a login node, or in a sidecar.
Start it before the agents, and give them its address as --rdzv-endpoint.
"""


def main(argv: Sequence[str]) -> int:
    """Run the `rendezvous` command; return the exit code."""
    args = _parser().parse_args(argv)
    try:
        config = LaunchConfig(
            run_id=args.rdzv_id or "",
            rdzv_endpoint=args.endpoint,
            rdzv_secret_file=args.rdzv_secret_file,
            rdzv_tls_cert=args.rdzv_tls_cert,
            rdzv_tls_key=args.rdzv_tls_key,
            rdzv_tls_ca=args.rdzv_tls_ca,
        )
        return _serve(config, args.endpoint, args.state_file)
    except ConfigError as error:
        print(f"torchelastic rendezvous serve: error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _serve(config: LaunchConfig, endpoint: str, state_file: str | None) -> int:
    # Imported here: help and usage errors need no event loop.
    from torchelastic.errors import RendezvousLost
    from torchelastic.rendezvous.embedded import server_process

    try:
        server_process.run(config, endpoint, state_file)
    except RendezvousLost as error:
        print(f"torchelastic rendezvous serve: {error}", file=sys.stderr)
        return EXIT_RENDEZVOUS_LOST
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchelastic rendezvous", description="Host the rendezvous of jobs."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve", help="host the rendezvous in its own process", description=_DESCRIPTION
    )
    serve.add_argument(
        "--endpoint",
        default=f"0.0.0.0:{DEFAULT_PORT}",
        metavar="HOST[:PORT]",
        help="where to listen: a loopback name or address listens on loopback only, any other on "
        "all addresses of this machine; port 0 picks a free port (default: %(default)s)",
    )
    serve.add_argument(
        "--rdzv-id",
        metavar="ID",
        help="serve only this job (default: any job, each separate from the others)",
    )
    serve.add_argument(
        "--state-file",
        metavar="FILE",
        help="file that keeps the state: after a restart with it, jobs continue",
    )
    serve.add_argument(
        "--rdzv-secret-file", metavar="FILE", help="file with the secret of the jobs"
    )
    serve.add_argument("--rdzv-tls-cert", metavar="FILE", help="certificate of this server (PEM)")
    serve.add_argument("--rdzv-tls-key", metavar="FILE", help="private key of that certificate")
    serve.add_argument(
        "--rdzv-tls-ca", metavar="FILE", help="CA certificate that signed all certificates"
    )
    return parser
