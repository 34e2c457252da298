"""How the nodes of a job find each other: the rules behind the rendezvous flags, all pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchelastic.cli.options.parser import Parsed
from torchelastic.config import DEFAULT_STATIC_PORT, ETCD_BACKENDS, OWN_ETCD, format_endpoint
from torchelastic.errors import ConfigError
from torchelastic.rendezvous.backend_parameters import (
    FILE_KEYS,
    check_backend,
    fields_from_conf,
    keys_without_meaning,
)


@dataclass(frozen=True)
class RendezvousBackend:
    """Where the nodes meet; without an endpoint nobody else can."""

    backend: str
    endpoint: str = ""
    node_rank: int | None = None


@dataclass(frozen=True)
class Patience:
    """The times of the rendezvous, in seconds."""

    settle: float
    lease: float
    wait_for_nodes: float


def arrange(parsed: Parsed, max_nodes: int) -> RendezvousBackend:
    """Decide on the rendezvous."""
    if parsed["standalone"]:
        # 0.2's way: etcd, where it is asked for, is started beside the job.
        at_etcd = parsed.given("rdzv_backend") and parsed["rdzv_backend"] in ETCD_BACKENDS
        return (
            RendezvousBackend(choose_backend(parsed), OWN_ETCD)
            if at_etcd
            else RendezvousBackend("c10d")
        )
    backend = choose_backend(parsed)
    if backend != "static":
        return RendezvousBackend(backend, parsed["rdzv_endpoint"])
    node_rank, port = parsed["node_rank"], parsed["master_port"]
    if node_rank >= max_nodes:
        raise ConfigError(
            f"--node-rank {node_rank} does not fit a job of {max_nodes} node(s): give --nnodes the "
            "number of nodes, and every node another rank from 0 on."
        )
    if parsed["rdzv_endpoint"]:
        return RendezvousBackend(backend, parsed["rdzv_endpoint"], node_rank)
    if port is None and max_nodes == 1:
        # torchrun's rule: nobody has to find this node, so it need not have a fixed port.
        return RendezvousBackend("c10d")
    endpoint = format_endpoint(parsed["master_addr"], DEFAULT_STATIC_PORT if port is None else port)
    return RendezvousBackend(backend, endpoint, node_rank)


def choose_backend(parsed: Parsed) -> str:
    """The rendezvous asked for; where none was, the one that the other flags imply."""
    backend: str = parsed["rdzv_backend"]
    if not parsed.given("rdzv_backend"):
        if parsed.given("node_rank"):
            return "static"
        if not parsed["rdzv_endpoint"]:
            addressed = parsed.given("master_addr") or parsed.given("master_port")
            return "static" if addressed else "c10d"
    check_backend(backend, parsed["rdzv_conf"])
    return backend


def patience(parsed: Parsed) -> Patience:
    """The times: by their own flags, else by torchrun's keys, else the defaults."""
    by_keys = fields_from_conf(parsed["rdzv_conf"])

    def chosen(dest: str) -> float:
        value: float = parsed[dest]
        return value if parsed.given(dest) else by_keys.get(dest, value)

    return Patience(chosen("settle"), chosen("lease"), chosen("wait_for_nodes"))


def files(parsed: Parsed) -> dict[str, Any]:
    """The fields for the secret and the certificates: by their flags, else by their keys."""
    by_keys = fields_from_conf(parsed["rdzv_conf"])
    names = [f"rdzv_{key}" for key in FILE_KEYS]
    return {name: parsed[name] or by_keys.get(name) for name in names}


def notes(parsed: Parsed, meeting: RendezvousBackend, max_nodes: int) -> tuple[str, ...]:
    """What was said about the rendezvous and is not heeded."""
    said = []
    without_meaning = keys_without_meaning(parsed["rdzv_conf"], meeting.backend)
    if without_meaning:
        said.append(
            f"These keys of --rdzv-conf have no meaning here and are ignored: "
            f"{', '.join(without_meaning)}."
        )
    unused = [
        f"--{dest.replace('_', '-')}"
        for dest in ("node_rank", "master_addr", "master_port")
        if parsed.given(dest)
    ]
    if unused and meeting.backend != "static" and max_nodes > 1:
        said.append(f"Only a static rendezvous uses {', '.join(unused)}: ignored.")
    return tuple(said)
