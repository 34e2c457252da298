"""Convert torchrun's rendezvous flags into a LaunchConfig. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchelastic.config import ETCD_BACKENDS, LaunchConfig, parse_truth
from torchelastic.errors import ConfigError
from torchelastic.rendezvous.backend_parameters import check_backend, fields_from_conf

#: `--rdzv-conf backend=NAME`; the default depends on the endpoint.
_BACKEND_KEY = "backend"
_SCHEME = "://"
#: torchrun counts restarts.
_NO_LIMIT = 1 << 31
_QUORUMS = ("majority", "none")
#: torchrun's default job id.
_NO_ID = "none"


def launch_config(
    endpoint: str,
    run_id: str,
    nodes: tuple[int, int],
    conf: Mapping[str, Any],
    *,
    local_addr: str | None = None,
) -> LaunchConfig:
    """Return the job config of a node; torchrun counts as one worker of its node.

    >>> made = launch_config("etcd://a:1,b:2", "job", (1, 2), {"last_call_timeout": 5})
    >>> made.rdzv_backend, made.settle
    ('etcd', 5.0)
    """
    backend, endpoint = _where(endpoint, str(conf.get(_BACKEND_KEY, "")))
    check_backend(backend, conf)
    if backend in ETCD_BACKENDS and nodes[1] > 1 and run_id in ("", _NO_ID):
        raise ConfigError(
            "The etcd rendezvous needs a job id: give every torchrun of this job the same "
            "--rdzv-id, and every other job another one."
        )
    texts = {str(key): str(value) for key, value in conf.items() if key != _BACKEND_KEY}
    return LaunchConfig(
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        run_id=run_id,
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=texts,
        local_addr=local_addr,
        max_restarts=_NO_LIMIT,
        **fields_from_conf(conf),
        **_flags_of_ours(conf),
    )


def _flags_of_ours(conf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that torchrun has no flags for.

    >>> _flags_of_ours({"quorum": "none", "two_node_takeover": 1})
    {'quorum': 'none', 'two_node_takeover': True}
    """
    fields: dict[str, Any] = {}
    if "quorum" in conf:
        if conf["quorum"] not in _QUORUMS:
            raise ConfigError(
                f"--rdzv-conf quorum is '{conf['quorum']}': it must be majority or none."
            )
        fields["quorum"] = conf["quorum"]
    if "witness" in conf:
        fields["witness"] = str(conf["witness"])
    if "two_node_takeover" in conf:
        fields["two_node_takeover"] = parse_truth(str(conf["two_node_takeover"]))
    return fields


def _where(endpoint: str, backend: str) -> tuple[str, str]:
    """Return the backend, and the endpoint without its scheme.

    >>> _where("node1:29400", ""), _where("etcd://a:1,b:2", "")
    (('c10d', 'node1:29400'), ('etcd', 'a:1,b:2'))
    """
    scheme, found, rest = endpoint.partition(_SCHEME)
    if not found:
        return backend or "c10d", endpoint
    named = "c10d" if scheme == "tcp" else scheme
    if backend and backend != named:
        raise ConfigError(
            f"--rdzv-endpoint {endpoint} and --rdzv-conf backend={backend} disagree: remove one."
        )
    return named, rest
