"""torch's `RendezvousHandler` over a LauncherNode: `torchrun --rdzv-backend=torchelastic`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from torchelastic import errors
from torchelastic.compat.torchrun.launcher_node import LauncherNode
from torchelastic.compat.torchrun.launcher_node_state import Ending
from torchelastic.compat.torchrun.torchrun_flags import launch_config
from torchelastic.config import LaunchConfig

BACKEND = "torchelastic"

#: torch's exception for each of ours; the first match counts.
_TORCHS: tuple[tuple[type[Exception], type[RendezvousError]], ...] = (
    (errors.JobClosed, RendezvousClosedError),
    (errors.NotEnoughNodes, RendezvousTimeoutError),
    (errors.LeaseExpired, RendezvousStateError),
    (errors.RendezvousError, RendezvousConnectionError),
)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler of a job; `next_rendezvous` joins it."""
    config = launch_config(
        params.endpoint,
        params.run_id,
        (params.min_nodes, params.max_nodes),
        params.config,
        local_addr=params.local_addr,
    )
    return TorchrunHandler(config)


class TorchrunHandler(RendezvousHandler):
    """This node of a job whose workers torchrun starts."""

    def __init__(self, config: LaunchConfig) -> None:
        self._run_id = config.run_id
        self._node = LauncherNode(config, "torchrun")

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """True: the workers use the store of their generation, which a torchrun process hosts."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        with _torchs_errors():
            entered = self._node.next_world()
        return RendezvousInfo(
            entered.store,
            entered.node_rank,
            entered.nodes,
            RendezvousStoreInfo(entered.master_addr, entered.master_port),
        )

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers must be stopped for another world, for whatever reason.

        torchrun then restarts its workers without spending a restart.
        """
        with _torchs_errors():
            return int(self._node.must_stop())

    def is_closed(self) -> bool:
        return self._node.is_closed

    def set_closed(self) -> None:
        """End the job for all nodes; a node between two worlds only leaves."""
        self._node.end("failed", "the rendezvous was closed")

    def shutdown(self) -> bool:
        """Leave the job. torchrun's current exception shows how it ended."""
        ending, why = _ending(sys.exc_info()[1])
        return self._node.end(ending, why)


def _ending(raised: BaseException | None) -> tuple[Ending, str]:
    """Return how torchrun's part in a job ends, from the exception it is about to raise.

    Workers that failed too often end the job, as with torch's own rendezvous. If one torchrun ends
    for any other reason, the other nodes continue.

    >>> _ending(None), _ending(ValueError("boom"))
    (('done', ''), ('left', 'ValueError: boom'))
    """
    if raised is None:
        return "done", ""
    words = f"{type(raised).__name__}: {_first_line(raised)}"
    if isinstance(raised, ChildFailedError):
        return "failed", f"torchrun gave up restarting its workers ({words})"
    return "left", words


def _first_line(raised: BaseException) -> str:
    return next((line for line in str(raised).splitlines() if line.strip(" =-")), "").strip()


@contextlib.contextmanager
def _torchs_errors() -> Iterator[None]:
    """Translate our exceptions into torch's."""
    try:
        yield
    except errors.TorchElasticError as error:
        raise torchs_error(error) from error


def torchs_error(error: Exception) -> Exception:
    """Return torch's exception for one of ours; a user error is returned unchanged."""
    for ours, torchs in _TORCHS:
        if isinstance(error, ours):
            return torchs(str(error))
    return error
