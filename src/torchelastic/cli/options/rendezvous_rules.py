"""The rules behind the rendezvous flags: where and how the nodes of a job meet. Pure."""

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
class BackendChoice:
    """The chosen rendezvous; without an endpoint it is private to this node."""

    backend: str
    endpoint: str = ""
    node_rank: int | None = None


@dataclass(frozen=True)
class Patience:
    """The timeouts of the rendezvous, in seconds."""

    settle: float
    lease: float
    wait_for_nodes: float


def arrange(parsed: Parsed, max_nodes: int) -> BackendChoice:
    """Choose the rendezvous."""
    if parsed["standalone"]:
        # As in 0.2: etcd, if requested, is started beside the job.
        at_etcd = parsed.given("rdzv_backend") and parsed["rdzv_backend"] in ETCD_BACKENDS
        return BackendChoice(choose_backend(parsed), OWN_ETCD) if at_etcd else BackendChoice("c10d")
    backend = choose_backend(parsed)
    if backend != "static":
        return BackendChoice(backend, parsed["rdzv_endpoint"])
    node_rank, port = parsed["node_rank"], parsed["master_port"]
    if node_rank >= max_nodes:
        raise ConfigError(
            f"--node-rank {node_rank} is too large for a job of {max_nodes} node(s): set --nnodes "
            "to the number of nodes, and give each node a different rank, starting at 0."
        )
    if parsed["rdzv_endpoint"]:
        return BackendChoice(backend, parsed["rdzv_endpoint"], node_rank)
    if port is None and max_nodes == 1:
        # As torchrun does: no other node connects to this one, so it needs no fixed port.
        return BackendChoice("c10d")
    endpoint = format_endpoint(parsed["master_addr"], DEFAULT_STATIC_PORT if port is None else port)
    return BackendChoice(backend, endpoint, node_rank)


def choose_backend(parsed: Parsed) -> str:
    """Return the requested rendezvous, or else the one that the other flags imply."""
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
    """Return the timeouts: from their flags, else from torchrun's keys, else the defaults."""
    by_keys = fields_from_conf(parsed["rdzv_conf"])

    def chosen(dest: str) -> float:
        value: float = parsed[dest]
        return value if parsed.given(dest) else by_keys.get(dest, value)

    return Patience(chosen("settle"), chosen("lease"), chosen("wait_for_nodes"))


def files(parsed: Parsed) -> dict[str, Any]:
    """Return the fields for the secret and the certificates: from their flags or their keys."""
    by_keys = fields_from_conf(parsed["rdzv_conf"])
    names = [f"rdzv_{key}" for key in FILE_KEYS]
    return {name: parsed[name] or by_keys.get(name) for name in names}


def notes(parsed: Parsed, rendezvous: BackendChoice, max_nodes: int) -> tuple[str, ...]:
    """Return a sentence for each rendezvous flag or key that is ignored."""
    sentences = []
    without_meaning = keys_without_meaning(parsed["rdzv_conf"], rendezvous.backend)
    if without_meaning:
        sentences.append(f"Ignored keys of --rdzv-conf: {', '.join(without_meaning)}.")
    unused = [
        f"--{dest.replace('_', '-')}"
        for dest in ("node_rank", "master_addr", "master_port")
        if parsed.given(dest)
    ]
    if unused and rendezvous.backend != "static" and max_nodes > 1:
        sentences.append(f"Ignored {', '.join(unused)}: only a static rendezvous uses them.")
    return tuple(sentences)
