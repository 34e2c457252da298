"""The coordinator: gives a worker its world, and has the hooks of release 0.1."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchelastic import torch_backends
from torchelastic.errors import ConfigError
from torchelastic.metrics.reporting import report
from torchelastic.torch_private import Store
from torchelastic.training import session
from torchelastic.training.group.group import PeerLostError
from torchelastic.training.state import State
from torchelastic.worker import channel

__all__ = ["Coordinator", "CoordinatorP2P"]

log = logging.getLogger(__name__)

#: Whether this process has already trained under its agent, which allows one training.
_enlisted = False

#: The timeout of collectives, in milliseconds.
PROCESS_GROUP_TIMEOUT = 30 * 60 * 1000

#: A worker whose progress rate is below this share of the best is a straggler.
STRAGGLER_THRESHOLD = 0.8


#: Methods of 0.1's loop that have nothing to do here.
_NEVER_CALLED = ("rendezvous_barrier", "init_process_group", "barrier")


class WorkerStats(ABC):
    """Statistics of one worker, returned by its `train_step` beside the state."""

    @abstractmethod
    def get_progress_rate(self) -> float | None:
        """Return this worker's speed, larger is faster, in any unit; None if not known."""


class SimpleWorkerStats(WorkerStats):
    """Statistics that hold only a progress rate."""

    def __init__(self, progress_rate: float | None) -> None:
        self.progress_rate = progress_rate

    def get_progress_rate(self) -> float | None:
        return self.progress_rate


class Coordinator(ABC):
    """The coordinator interface of release 0.1.

    `train` takes a `CoordinatorP2P`. A subclass may override the hooks `on_error`,
    `should_save_checkpoint`, `should_stop_training`, `should_rendezvous`, `monitor_progress` and
    `report_progress`.
    """

    @abstractmethod
    def rendezvous_barrier(self) -> tuple[Store, int, int]:
        """Return the current world's store, this worker's rank, and the world size."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all workers of the world."""

    @abstractmethod
    def init_process_group(self) -> None:
        """Check that there is a process group; `train` builds one in every world."""

    @abstractmethod
    def should_save_checkpoint(self) -> bool:
        """Return True to write a checkpoint now. Called after every step."""

    @abstractmethod
    def should_rendezvous(self, state: State) -> bool:
        """Return True to rebuild the world. Called after every step if overridden.

        All ranks must return the same. Nodes that join or leave do not need this: agents see them.
        """

    @abstractmethod
    def should_stop_training(self) -> bool:
        """Return True to end the training. Called after every step."""

    @abstractmethod
    def signal_training_done(self) -> None:
        """End the training on all workers after this step."""

    @abstractmethod
    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:
        """Handle the statistics that train_step returned. Called after every step."""

    @abstractmethod
    def report_progress(self, state: State) -> None:
        """Report progress. Called after every step."""

    @abstractmethod
    def on_error(self, e: Exception) -> None:
        """Handle an error. Called for every error except the end of a world."""


class CoordinatorP2P(Coordinator):
    """Gets its worlds from the agent of `torchelastic run`, or joins a rendezvous itself.

    Without `init_method`, the agent decides everything. With
    `etcd://HOST:PORT/RUN_ID?min_workers=N` or `tcp://...` no launcher is needed: this process is
    its own node, with one worker. All times are in milliseconds.
    """

    #: Workers that report a progress rate compare it every this many steps.
    MONITOR_PROGRESS_FREQ = 1000

    def __init__(
        self,
        c10d_backend: str = "gloo",
        init_method: str | None = None,
        max_num_trainers: int | None = None,
        process_group_timeout: int = PROCESS_GROUP_TIMEOUT,
        coordinator_pg_timeout: int | None = None,
    ) -> None:
        """`coordinator_pg_timeout` is checked as in 0.1, where a second group used it."""
        _check_times(process_group_timeout, coordinator_pg_timeout)
        if max_num_trainers is not None and max_num_trainers < 1:
            raise ConfigError(f"max_num_trainers must be at least 1, not {max_num_trainers}.")
        self.c10d_backend = c10d_backend
        self.init_method = init_method
        self.max_num_trainers = max_num_trainers
        self.process_group_timeout = process_group_timeout
        self.coordinator_pg_timeout = coordinator_pg_timeout
        self.stop_training = False
        #: Whether this worker is much slower than the fastest, if train_step reports its progress.
        self.is_worker_straggler = False
        self._link = _agents_link() if init_method is None else None
        if overridden := [name for name in _NEVER_CALLED if overrides(self, name)]:
            log.warning(
                "torchelastic.train ignores %s: the agent runs the rendezvous. Move the code to "
                "State.sync.",
                " and ".join(f"{type(self).__name__}.{name}" for name in overridden),
            )

    def open(self) -> channel.WorkerLink:
        """Return the channel that orders come on. Called by `torchelastic.train`."""
        if self.init_method is None:
            return self._enlist()
        from torchelastic.training import standalone

        node = standalone.start(
            self.init_method, max_workers=self.max_num_trainers, timeout=self.timeout
        )
        return channel.WorkerLink(node)

    def _enlist(self) -> channel.WorkerLink:
        global _enlisted
        if _enlisted:
            raise ConfigError(
                "This job has already trained: under 'torchelastic run', call train once per "
                "script, with all steps."
            )
        link, self._link = self._link or _agents_link(), None
        _enlisted = True
        return link

    @property
    def timeout(self) -> timedelta:
        """The timeout of a collective."""
        return timedelta(milliseconds=self.process_group_timeout)

    @property
    def rank(self) -> int:
        return session.current().rank

    @property
    def world_size(self) -> int:
        return session.current().size

    @property
    def store(self) -> Store:
        """The store of the current world."""
        return session.current().store

    # --- release 0.1's methods -------------------------------------------------------------------

    def rendezvous_barrier(self) -> tuple[Store, int, int]:
        return self.store, self.rank, self.world_size

    def init_process_group(self) -> None:
        session.current()

    def barrier(self) -> None:
        dist.barrier()

    def should_save_checkpoint(self) -> bool:
        return False

    def should_rendezvous(self, state: State) -> bool:
        return False

    def should_stop_training(self) -> bool:
        return self.stop_training

    def signal_training_done(self) -> None:
        self.stop_training = True

    def monitor_progress(self, state: State, worker_stats: WorkerStats | None) -> None:
        """Report the progress rate; every `MONITOR_PROGRESS_FREQ` steps, compare all workers'.

        The comparison is a collective: train_step must return statistics on all workers or none.
        """
        if worker_stats is None:
            return
        rate = worker_stats.get_progress_rate()
        if rate is not None:
            report("progress_rate", rate)
        # Not the steps that this process has seen: a replacement has seen fewer than the others.
        if session.current().version[1] % self.MONITOR_PROGRESS_FREQ == 0:
            self._compare(rate)

    def _compare(self, rate: float | None) -> None:
        rates = _gather(float("nan") if rate is None else rate)
        best = max((other for other in rates if other == other), default=0.0)
        if rate is not None and best > 0:
            self.last_relative_prog_rate = rate / best
        slow = rate is not None and best > 0 and rate / best < STRAGGLER_THRESHOLD
        if slow and not self.is_worker_straggler:
            log.warning(
                "Rank %d is a straggler: its progress rate is %.3g, the best rank's is %.3g.",
                self.rank,
                rate,
                best,
            )
        self.is_worker_straggler = slow

    def report_progress(self, state: State) -> None:
        return

    def on_error(self, e: Exception) -> None:
        # A lost peer's own agent reports it, and which rank it was.
        level = logging.INFO if isinstance(e, PeerLostError) else logging.ERROR
        log.log(level, "Rank %d: %s: %s", self._rank_if_any(), type(e).__name__, e)

    def _rank_if_any(self) -> int:
        try:
            return self.rank
        except RuntimeError:
            return -1


def overrides(coordinator: CoordinatorP2P, name: str) -> bool:
    """Return whether a user's class overrides this method."""
    return getattr(type(coordinator), name) is not getattr(CoordinatorP2P, name)


def _check_times(process_group: int, coordinator: int | None) -> None:
    for name, value in (
        ("process_group_timeout", process_group),
        ("coordinator_pg_timeout", coordinator),
    ):
        if value is not None and value <= 0:
            raise ConfigError(f"{name} must be at least 1 millisecond, not {value}.")
    if coordinator is not None and coordinator < process_group:
        raise ConfigError(
            f"coordinator_pg_timeout ({coordinator} ms) must be at least process_group_timeout "
            f"({process_group} ms)."
        )


def _agents_link() -> channel.WorkerLink:
    link = channel.link()
    if link is None:
        raise ConfigError(
            "This process has no agent. Start the script with 'torchelastic run', or pass "
            "CoordinatorP2P an init_method such as 'tcp://HOST:29400/RUN_ID?min_workers=1'."
        )
    return link


def _gather(value: float) -> list[float]:
    """Collective: return every rank's value, by rank."""
    device = torch_backends.here()
    mine: Any = torch.tensor([value], dtype=torch.float64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return [float(one.item()) for one in all_of_them]
