"""The `rendezvous` of 0.2 and 0.1: the handler that a node asks for its rank in each world, the
registry of backends, and the parameters.

0.2 was built on etcd's v2 API, which etcd 3.6 no longer has. The handler of an etcd server is made
from parameters: `create_rdzv_handler(RendezvousParameters("etcd", ...))`.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from torchelastic.compat.old_names import REFUSED
from torchelastic.config import ETCD_BACKENDS
from torchelastic.errors import (
    ConfigError,
    RendezvousClosedException,
    RendezvousError,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)
from torchelastic.rendezvous.backend_parameters import BACKENDS, RendezvousParameters, check_backend

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same

__all__ = [
    "RendezvousClosedError",
    "RendezvousClosedException",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousException",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerFactory",
    "RendezvousNonRetryableError",
    "RendezvousParameters",
    "RendezvousTimeoutError",
    "RendezvousTimeoutException",
    "create_handler",
    "get_rendezvous_handler",
    "register",
]

#: 0.2's name for the base of what a handler raises, and torch's names for the others.
RendezvousException = RendezvousError
RendezvousClosedError = RendezvousClosedException
RendezvousTimeoutError = RendezvousTimeoutException
RendezvousConnectionError = RendezvousNonRetryableError


class RendezvousHandler(abc.ABC):
    """The rendezvous of a node, for a launcher that starts the workers itself."""

    @abc.abstractmethod
    def get_backend(self) -> str:
        """The name this handler is registered by."""

    @abc.abstractmethod
    def next_rendezvous(self) -> tuple[Store, int, int]:
        """Wait for a world with this node; return its store, this node's rank, the node count.

        Call it again only when no worker of the last world is left here. Raises
        `RendezvousClosedException`, `RendezvousTimeoutException` or `RendezvousNonRetryableError`.
        """

    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Return True if the job has ended for all nodes."""

    @abc.abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes."""

    @abc.abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return more than 0 if the workers must be stopped for another world."""

    @abc.abstractmethod
    def get_run_id(self) -> str:
        """The job's id."""

    def shutdown(self) -> bool:
        """Leave the job; return False if there was an error. By default there is nothing to do."""
        return True


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]

#: Imported by name when it is used: it is in a layer above this one, and imports torch.
_JOINING = "torchelastic.compat.torchrun.release02_handler"


class AgentRendezvousHandler(RendezvousHandler):
    """A built-in rendezvous backend.

    In a `WorkerSpec` it only holds the parameters; the agent of the job joins the rendezvous. A
    custom launcher calls `next_rendezvous`: then this process is the node.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        check_backend(params.backend, params.config)
        self.params = params
        self._joined: Any = None

    def get_backend(self) -> str:
        return self.params.backend

    def get_run_id(self) -> str:
        return self.params.run_id

    def next_rendezvous(self) -> tuple[Store, int, int]:
        if self._joined is None:
            self._joined = importlib.import_module(_JOINING).Release02Handler(self.params)
        found: tuple[Store, int, int] = self._joined.next_rendezvous()
        return found

    def is_closed(self) -> bool:
        return self._joined is not None and bool(self._joined.is_closed())

    def set_closed(self) -> None:
        """End the job for all nodes; a node between two worlds only leaves."""
        if self._joined is not None:
            self._joined.set_closed()

    def num_nodes_waiting(self) -> int:
        return 0 if self._joined is None else int(self._joined.num_nodes_waiting())

    def shutdown(self) -> bool:
        """Leave the job; nothing to do if the agent joined it."""
        return self._joined is None or bool(self._joined.shutdown())


class RendezvousHandlerFactory:
    """Creates handlers by the name of their backend."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register a backend; each name once."""
        if not backend:
            raise ConfigError("A rendezvous backend needs a name.")
        if backend in self._creators:
            raise ConfigError(
                f"The rendezvous backend '{backend}' is already registered: use another name."
            )
        self._creators[backend] = creator

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Create the handler for these parameters; ConfigError if the backend is unknown."""
        creator = self._creators.get(params.backend)
        if creator is None:
            check_backend(params.backend, params.config)  # its error lists the known ones
            raise ConfigError(f"The rendezvous backend '{params.backend}' is not registered.")
        return creator(params)


#: The one that `register`, `create_handler` and `get_rendezvous_handler` use.
handler_factory = RendezvousHandlerFactory()
for _name in BACKENDS:
    handler_factory.register(_name, AgentRendezvousHandler)

register = handler_factory.register
create_handler = handler_factory.create_handler
get_rendezvous_handler = handler_factory.create_handler


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


class RendezvousParameters01(RendezvousParameters):
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


def get_rendezvous(params: RendezvousParameters) -> Any:
    """Create the handler of a backend of ours, or of a scheme registered with torch's
    `register_rendezvous_handler`."""
    if params.backend in BACKENDS:
        return handler_factory.create_handler(params)
    from torch.distributed.rendezvous import rendezvous

    numbers = {"min_workers": params.min_nodes, "max_workers": params.max_nodes}
    query = urlencode({**numbers, **params.config}, safe="/:")
    return rendezvous(f"{params.backend}://{params.endpoint}/{params.run_id}?{query}")
