"""0.1's `rendezvous.parameters`: the keys of a rendezvous in one text, and the handler for them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from torchelastic.compat.release02.rendezvous_api import handler_factory
from torchelastic.rendezvous import backend_parameters
from torchelastic.rendezvous.backend_parameters import BACKENDS

__all__ = ["RendezvousParameters", "get_rendezvous"]


class RendezvousParameters(backend_parameters.RendezvousParameters):
    """0.1's form of the parameters; `config` is `key=value,key=value`."""

    def __init__(
        self,
        rdzv_backend: str,
        rdzv_endpoint: str,
        run_id: str,
        min_workers: int,
        max_workers: int,
        config: str | None = None,
    ) -> None:
        pairs = (pair.partition("=") for pair in (config or "").split(",") if pair)
        keys = {key: value for key, _, value in pairs}
        super().__init__(rdzv_backend, rdzv_endpoint, run_id, min_workers, max_workers, **keys)


def get_rendezvous(params: backend_parameters.RendezvousParameters) -> Any:
    """Create the handler of a backend of ours, or of a scheme registered with torch's
    `register_rendezvous_handler`."""
    if params.backend in BACKENDS:
        return handler_factory.create_handler(params)
    from torch.distributed.rendezvous import rendezvous

    numbers = {"min_workers": params.min_nodes, "max_workers": params.max_nodes}
    query = urlencode({**numbers, **params.config}, safe="/:")
    return rendezvous(f"{params.backend}://{params.endpoint}/{params.run_id}?{query}")
