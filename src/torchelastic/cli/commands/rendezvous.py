"""`torchelastic rendezvous serve`: the place where nodes meet, as a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchelastic.config import DEFAULT_PORT, LaunchConfig
from torchelastic.errors import EXIT_OK, EXIT_RENDEZVOUS_LOST, EXIT_USAGE, ConfigError

_DESCRIPTION = """\
Serve the rendezvous of jobs on a machine that trains nothing: a login node, or a sidecar. Give its
address to the agents as --rdzv-endpoint, and start it before them.
"""


def main(argv: Sequence[str]) -> int:
    """The `rendezvous` command; returns the exit code."""
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
    # Imported here: help and mistakes are answered without an event loop.
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
        prog="torchelastic rendezvous", description="The place where the nodes of jobs meet."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve", help="serve it as a process of its own", description=_DESCRIPTION
    )
    serve.add_argument(
        "--endpoint",
        default=f"0.0.0.0:{DEFAULT_PORT}",
        metavar="HOST[:PORT]",
        help="where to listen: a name or address of loopback for that alone, any other for every "
        "address of this machine; port 0 takes a free one (default: %(default)s)",
    )
    serve.add_argument(
        "--rdzv-id",
        metavar="ID",
        help="the only job that is served (default: any, each apart from the others)",
    )
    serve.add_argument(
        "--state-file",
        metavar="FILE",
        help="file that has what must not be forgotten: started again with it, jobs go on",
    )
    serve.add_argument(
        "--rdzv-secret-file", metavar="FILE", help="file with the secret of the jobs"
    )
    serve.add_argument("--rdzv-tls-cert", metavar="FILE", help="TLS: certificate of this server")
    serve.add_argument("--rdzv-tls-key", metavar="FILE", help="TLS: its key")
    serve.add_argument("--rdzv-tls-ca", metavar="FILE", help="TLS: authority of all certificates")
    return parser
