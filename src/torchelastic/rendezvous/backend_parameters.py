"""Rendezvous parameters as 0.2's callers pass them, and the meaning of torchrun's `rdzv_conf`
keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchelastic.config import ETCD_BACKENDS, parse_truth
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
    try:
        value = float(conf[key])
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"Rendezvous key {key}: {conf[key]!r} is not a valid duration: write a number of "
            "seconds, 0 or more."
        )
    return value
