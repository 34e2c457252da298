"""Rendezvous parameters as users give them: 0.2's, torchrun's `rdzv_conf` keys, and a URL as in
0.1's `init_method`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from torchelastic.config import (
    DEFAULT_ETCD_PORT,
    DEFAULT_PORT,
    ETCD_BACKENDS,
    format_endpoint,
    parse_endpoints,
    parse_truth,
)
from torchelastic.config.values import seconds
from torchelastic.errors import ConfigError
from torchelastic.rendezvous.etcd.settings import KEYS, EtcdSettings

BACKENDS = ("c10d", "static", *ETCD_BACKENDS)

# 0.2's defaults, for callers that read them; a job uses these values only if they are given.
_TIMEOUT = 600
_LAST_CALL_TIMEOUT = 30
# torch's defaults, used if only one of the two factors of the lease is set.
_KEEP_ALIVE = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3}
_WAIT_KEYS = ("join_timeout", "timeout")
#: Paths of the credentials; the `LaunchConfig` fields have the prefix `rdzv_`. The secret itself is
#: not a key, because keys are logged.
FILE_KEYS = ("secret_file", "tls_cert", "tls_key", "tls_ca")
_KEYS_WITH_MEANING = {
    *("last_call_timeout", "is_host", "own_endpoint", "rank"),
    *(*FILE_KEYS, *_WAIT_KEYS, *_KEEP_ALIVE),
}


class RendezvousParameters:
    """The address, the backend and the number of nodes of a rendezvous."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        **kwargs: Any,
    ) -> None:
        if not 1 <= min_nodes <= max_nodes:
            raise ConfigError(
                f"min_nodes={min_nodes}, max_nodes={max_nodes} is not a valid range: "
                "1 <= min_nodes <= max_nodes is required."
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs

    @property
    def timeout(self) -> int:
        """Seconds to wait for nodes."""
        return self.get_as_int("timeout", _TIMEOUT) or 0

    @property
    def last_call_timeout(self) -> int:
        """Seconds to wait for more nodes once there are `min_nodes`."""
        return self.get_as_int("last_call_timeout", _LAST_CALL_TIMEOUT) or 0

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key as given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """The value of a key as a boolean."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        try:
            return parse_truth(str(value))
        except ConfigError as error:
            raise ConfigError(f"Rendezvous key {key}: {error}") from None

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """The value of a key as an integer."""
        value = self.get(key, default)
        return None if value is None else _whole(key, value)


def check_backend(backend: str, conf: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an unknown backend, or invalid etcd settings."""
    if backend not in BACKENDS:
        raise ConfigError(
            f"Unknown rendezvous backend '{backend}': use {', '.join(BACKENDS[:-1])} or "
            f"{BACKENDS[-1]}; c10d needs no server."
        )
    if backend in ETCD_BACKENDS:
        EtcdSettings.of(conf)


def fields_from_conf(conf: Mapping[str, Any]) -> dict[str, Any]:
    """The `LaunchConfig` fields that torchrun's keys set, only those that are given.

    >>> fields_from_conf({"last_call_timeout": "5", "keep_alive_interval": 1, "read_timeout": 60})
    {'settle': 5.0, 'lease': 3.0}
    """
    fields: dict[str, Any] = {}
    if "last_call_timeout" in conf:
        fields["settle"] = _seconds(conf, "last_call_timeout")
    if any(key in conf for key in _KEEP_ALIVE):
        whole = {**_KEEP_ALIVE, **conf}
        fields["lease"] = math.prod(_seconds(whole, key) for key in _KEEP_ALIVE)
    for key in reversed(_WAIT_KEYS):
        if key in conf:
            fields["wait_for_nodes"] = _seconds(conf, key)
    if "rank" in conf:
        fields["node_rank"] = _whole("rank", conf["rank"])
    fields.update((f"rdzv_{key}", str(conf[key])) for key in FILE_KEYS if conf.get(key))
    return fields


def keys_without_meaning(conf: Mapping[str, Any], backend: str) -> list[str]:
    """The keys that have no effect here."""
    with_meaning = _KEYS_WITH_MEANING | set(KEYS if backend in ETCD_BACKENDS else ())
    return sorted(set(conf) - with_meaning)


def _whole(key: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"Rendezvous key {key}: {value!r} is not a whole number.") from None


def _seconds(conf: Mapping[str, Any], key: str) -> float:
    return seconds(str(conf[key]), f"Rendezvous key {key}")


# --- a URL ---------------------------------------------------------------------------------------

# etcd://localhost:2379/job-1?min_workers=2&max_workers=4     at an etcd server
# etcd://etcd1:2379,etcd2:2379/job-1?min_workers=2            at an etcd cluster
# tcp://node1:29400/job-1?min_workers=2                       embedded, hosted by node1

#: Scheme -> (backend, default port).
_SCHEMES = {"etcd": ("etcd", DEFAULT_ETCD_PORT), "tcp": ("c10d", DEFAULT_PORT)}
_FORM = "write SCHEME://HOST[:PORT]/RUN_ID?min_workers=N&max_workers=M, where SCHEME is etcd or tcp"
#: Scheme, endpoints, and the rest; `urlsplit` does not support several endpoints.
_PARTS = re.compile(r"(\w+)://([^/?#]*)(.*)", re.DOTALL)

_NUMBERS = ("min_workers", "max_workers")
_TIMES = ("timeout", "last_call_timeout", "progress_timeout")
_QUORUMS = ("majority", "none")
#: Parameters of one scheme only; etcd's store checks the values.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "etcd": KEYS,
    "tcp": ("quorum", "witness"),
}


@dataclass(frozen=True, kw_only=True)
class RendezvousUrl:
    """The address of a rendezvous, and the number of workers."""

    #: `etcd` or `c10d`, the embedded rendezvous.
    backend: str
    #: `host:port`; several with commas.
    endpoint: str
    run_id: str
    min_workers: int
    max_workers: int
    #: Seconds to wait for `min_workers`; None: not given.
    timeout: float | None = None
    #: Seconds to wait for more workers once there are enough; None: not given.
    last_call_timeout: float | None = None
    #: Seconds without progress after which a worker is hung; 0: never, None: not given.
    progress_timeout: float | None = None
    #: Which workers may continue when others are lost: a majority, or all that are left with the
    #: host.
    quorum: Literal["majority", "none"] = "majority"
    #: Storage that breaks ties: a directory or a URL.
    witness: str = ""
    #: The paths among `secret_file`, `tls_cert`, `tls_key`, `tls_ca` that are given.
    files: Mapping[str, str] = field(default_factory=dict)
    #: Settings of the store, such as `etcd_prefix`.
    options: Mapping[str, str] = field(default_factory=dict)


def parse_url(url: str) -> RendezvousUrl:
    """Parse a URL; raise a `ConfigError` if it is invalid.

    >>> parse_url("etcd://localhost/job-1?min_workers=2").endpoint
    'localhost:2379'
    """
    endpoints, parts = _split(url)
    given = _parameters(url, parts)
    smallest, largest = _workers(url, given)
    backend, port = _SCHEMES[parts.scheme]
    return RendezvousUrl(
        backend=backend,
        endpoint=_endpoint(url, endpoints, port),
        run_id=_run_id(url, parts),
        min_workers=smallest,
        max_workers=largest,
        timeout=_time(url, given, "timeout"),
        last_call_timeout=_time(url, given, "last_call_timeout"),
        progress_timeout=_time(url, given, "progress_timeout"),
        quorum=_quorum(url, given),
        witness=given.get("witness", ""),
        files={name: given[name] for name in FILE_KEYS if name in given},
        options={name: given[name] for name in KEYS if name in given},
    )


def _split(url: str) -> tuple[str, SplitResult]:
    """The endpoints, and the other parts of the URL."""
    match = _PARTS.fullmatch(url)
    if match is None or match[1] not in _SCHEMES:
        raise ConfigError(f"'{url}' is not a rendezvous URL: {_FORM}.")
    parts = urlsplit(f"{match[1]}://host{match[3]}")
    if "@" in match[2] or parts.fragment:
        raise ConfigError(f"'{url}' has a user or a fragment, which are not supported: {_FORM}.")
    return match[2], parts


def _endpoint(url: str, text: str, default_port: int) -> str:
    try:
        endpoints = parse_endpoints(text, default_port)
        return ",".join(format_endpoint(host, port) for host, port in endpoints)
    except ConfigError:
        raise ConfigError(f"'{url}' has no host: {_FORM}.") from None


def _run_id(url: str, parts: SplitResult) -> str:
    run_id = unquote(parts.path.strip("/"))
    if not run_id:
        raise ConfigError(f"'{url}' has no job id: {_FORM}.")
    return run_id


def _parameters(url: str, parts: SplitResult) -> dict[str, str]:
    known = (*_NUMBERS, *_TIMES, *FILE_KEYS, *_OPTIONS[parts.scheme])
    given: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            raise ConfigError(f"Unknown parameter '{name}' in '{url}': use {', '.join(known)}.")
        if name in given:
            raise ConfigError(f"'{name}' appears twice in '{url}': remove one.")
        given[name] = value
    return given


def _workers(url: str, given: Mapping[str, str]) -> tuple[int, int]:
    if "min_workers" not in given:
        raise ConfigError(
            f"'{url}' lacks min_workers, the smallest number of workers the job may continue "
            f"with: {_FORM}."
        )
    smallest = _number(url, "min_workers", given["min_workers"])
    largest = _number(url, "max_workers", given.get("max_workers", given["min_workers"]))
    if not 1 <= smallest <= largest:
        raise ConfigError(
            f"min_workers={smallest}, max_workers={largest} in '{url}' is not a valid range: "
            "1 <= min_workers <= max_workers is required."
        )
    return smallest, largest


def _number(url: str, name: str, text: str) -> int:
    # Plain digits only: int() accepts `1_0`, and digits of other scripts.
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}='{text}' in '{url}' is not a whole number.")
    return int(text)


def _quorum(url: str, given: Mapping[str, str]) -> Literal["majority", "none"]:
    if (value := given.get("quorum", "majority")) not in _QUORUMS:
        raise ConfigError(f"Unknown quorum='{value}' in '{url}': use majority or none.")
    return "none" if value == "none" else "majority"


def _time(url: str, given: Mapping[str, str], name: str) -> float | None:
    return seconds(given[name], f"{name} in '{url}'") if name in given else None
