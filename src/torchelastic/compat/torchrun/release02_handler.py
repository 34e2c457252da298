"""0.2's rendezvous handler over a LauncherNode, for launchers written for 0.2."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torchelastic import errors
from torchelastic.compat.torchrun.launcher_node import AgentStore, LauncherNode
from torchelastic.compat.torchrun.torchrun_flags import launch_config
from torchelastic.rendezvous.backend_parameters import RendezvousParameters


class Release02Handler:
    """The part of `RendezvousHandler` that joins a job."""

    def __init__(self, params: RendezvousParameters) -> None:
        config = launch_config(
            params.endpoint,
            params.run_id,
            (params.min_nodes, params.max_nodes),
            {"backend": params.backend, **params.config},
            local_addr=params.get("local_addr"),
        )
        self._node = LauncherNode(config, "the launcher")

    def next_rendezvous(self) -> tuple[AgentStore, int, int]:
        with _old_errors():
            entered = self._node.next_world()
        return entered.store, entered.node_rank, entered.nodes

    def num_nodes_waiting(self) -> int:
        with _old_errors():
            return int(self._node.must_stop())

    def is_closed(self) -> bool:
        return self._node.is_closed

    def set_closed(self) -> None:
        self._node.end("failed", "the rendezvous was closed")

    def shutdown(self) -> bool:
        """End the job if no exception is being handled; otherwise only this node leaves."""
        raised = sys.exc_info()[1]
        return self._node.end("done" if raised is None else "left", repr(raised))


@contextlib.contextmanager
def _old_errors() -> Iterator[None]:
    """Translate our exceptions into those of 0.2."""
    try:
        yield
    except errors.JobClosed as error:
        raise errors.RendezvousClosedException(str(error)) from error
    except errors.NotEnoughNodes as error:
        raise errors.RendezvousTimeoutException(str(error)) from error
    except errors.RendezvousError as error:
        raise errors.RendezvousNonRetryableError(str(error)) from error
