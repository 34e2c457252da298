"""0.2's rendezvous at an etcd server.

0.2 was built on etcd's v2 API, which etcd 3.6 no longer has. Create a handler from parameters:
`create_rdzv_handler(RendezvousParameters("etcd", ...))`.
"""

from __future__ import annotations

from typing import Any

from torchelastic.compat.old_names import REFUSED
from torchelastic.compat.release02.rendezvous_api import AgentRendezvousHandler
from torchelastic.config import ETCD_BACKENDS
from torchelastic.errors import ConfigError
from torchelastic.rendezvous.backend_parameters import RendezvousParameters

__all__ = ["EtcdRendezvous", "EtcdRendezvousHandler", "EtcdStore", "create_rdzv_handler"]


class EtcdRendezvousHandler(AgentRendezvousHandler):
    """A rendezvous handler that uses etcd; `create_rdzv_handler` creates one."""

    def __init__(self, params: RendezvousParameters) -> None:
        if not isinstance(params, RendezvousParameters) or params.backend not in ETCD_BACKENDS:
            raise ConfigError(
                "EtcdRendezvousHandler takes RendezvousParameters whose backend is etcd."
            )
        super().__init__(params)


def create_rdzv_handler(rdzv_params: RendezvousParameters) -> EtcdRendezvousHandler:
    """The handler for a rendezvous at etcd."""
    return EtcdRendezvousHandler(rdzv_params)


class EtcdRendezvous:
    """0.2's implementation over python-etcd: not available."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(REFUSED["EtcdRendezvous"])


class EtcdStore:
    """0.2's store over python-etcd: not available."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(REFUSED["EtcdStore"])
