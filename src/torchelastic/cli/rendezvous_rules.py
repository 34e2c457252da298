"""How the nodes of a job find each other: the rules behind the rendezvous flags, all pure."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.cli import values
from torchelastic.cli.parser import Parsed
from torchelastic.config import DEFAULT_STATIC_PORT, format_endpoint
from torchelastic.errors import ConfigError

BACKENDS = ("c10d", "static")
_ETCD = ("etcd", "etcd-v2", "etcd-v3")

# torch's defaults, for when a user sets only one of the two factors of the lease.
_KEEP_ALIVE_INTERVAL = "5"
_KEEP_ALIVE_MAX_ATTEMPT = "3"
_LEASE_KEYS = ("keep_alive_interval", "keep_alive_max_attempt")
_WAIT_KEYS = ("join_timeout", "timeout")
_KEYS_WITH_MEANING = {"last_call_timeout", "is_host", *_LEASE_KEYS, *_WAIT_KEYS}


@dataclass(frozen=True)
class Meeting:
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


def arrange(parsed: Parsed, max_nodes: int) -> Meeting:
    """Decide on the rendezvous."""
    if parsed["standalone"]:
        return Meeting("c10d")
    backend = choose_backend(parsed)
    if backend != "static":
        return Meeting(backend, parsed["rdzv_endpoint"])
    node_rank, port = parsed["node_rank"], parsed["master_port"]
    if node_rank >= max_nodes:
        raise ConfigError(
            f"--node-rank {node_rank} does not fit a job of {max_nodes} node(s): give --nnodes the "
            "number of nodes, and every node another rank from 0 on."
        )
    if parsed["rdzv_endpoint"]:
        return Meeting(backend, parsed["rdzv_endpoint"], node_rank)
    if port is None and max_nodes == 1:
        # torchrun's rule: nobody has to find this node, so it need not have a fixed port.
        return Meeting("c10d")
    endpoint = format_endpoint(parsed["master_addr"], DEFAULT_STATIC_PORT if port is None else port)
    return Meeting(backend, endpoint, node_rank)


def choose_backend(parsed: Parsed) -> str:
    """The rendezvous asked for; where none was, the one that the other flags imply."""
    backend: str = parsed["rdzv_backend"]
    if not parsed.given("rdzv_backend"):
        if parsed.given("node_rank"):
            return "static"
        if not parsed["rdzv_endpoint"]:
            addressed = parsed.given("master_addr") or parsed.given("master_port")
            return "static" if addressed else "c10d"
    if backend in _ETCD:
        raise ConfigError(
            f"The {backend} rendezvous is not available in this version: write --rdzv-backend c10d "
            "with --rdzv-endpoint HOST:PORT naming a node of the job, which needs no server."
        )
    if backend not in BACKENDS:
        raise ConfigError(
            f"--rdzv-backend '{backend}' is not available: write {' or '.join(BACKENDS)}."
        )
    return backend


def patience(parsed: Parsed) -> Patience:
    """The times: by their own flags, else by torchrun's keys, else the defaults."""
    settle, lease, wait = parsed["settle"], parsed["lease"], parsed["wait_for_nodes"]
    conf: dict[str, str] = parsed["rdzv_conf"]
    if not parsed.given("settle") and "last_call_timeout" in conf:
        settle = _seconds(conf, "last_call_timeout")
    if not parsed.given("lease") and any(key in conf for key in _LEASE_KEYS):
        lease = _lease(conf)
    wait_key = next((key for key in _WAIT_KEYS if key in conf), None)
    if not parsed.given("wait_for_nodes") and wait_key is not None:
        wait = _seconds(conf, wait_key)
    return Patience(settle, lease, wait)


def _lease(conf: dict[str, str]) -> float:
    conf = {
        "keep_alive_interval": _KEEP_ALIVE_INTERVAL,
        "keep_alive_max_attempt": _KEEP_ALIVE_MAX_ATTEMPT,
        **conf,
    }
    lease = _seconds(conf, "keep_alive_interval") * _seconds(conf, "keep_alive_max_attempt")
    if lease == 0:
        raise ConfigError(
            "--rdzv-conf: keep_alive_interval and keep_alive_max_attempt must be > 0."
        )
    return lease


def _seconds(conf: dict[str, str], key: str) -> float:
    try:
        return values.seconds(conf[key])
    except ConfigError as error:
        raise ConfigError(f"--rdzv-conf {key} {error}") from None


def notes(parsed: Parsed, meeting: Meeting, max_nodes: int) -> tuple[str, ...]:
    """What was said about the rendezvous and is not heeded."""
    said = []
    without_meaning = sorted(set(parsed["rdzv_conf"]) - _KEYS_WITH_MEANING)
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
