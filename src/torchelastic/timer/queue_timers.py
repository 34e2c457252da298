"""Timers over a `multiprocessing.Queue`, for processes started without the launcher."""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from torchelastic.timer.timer_requests import (
    RELEASE,
    RequestQueue,
    TimerClient,
    TimerRequest,
    check_monotonic,
)
from torchelastic.timer.timer_server import TimerServer

log = logging.getLogger(__name__)


class LocalTimerClient(TimerClient):
    """Sends this process's timers, identified by its pid, to a `LocalTimerServer`."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        check_monotonic(expiration_time)
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, RELEASE))


class MultiprocessingRequestQueue(RequestQueue):
    """Requests from a `multiprocessing.Queue`."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def size(self) -> int:
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        deadline = time.monotonic() + timeout
        requests: list[TimerRequest] = []
        while len(requests) < size:
            try:
                request = self._mp_queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if request is None:  # `wake`
                break
            requests.append(request)
        return requests

    def wake(self) -> None:
        self._mp_queue.put(None)


@dataclass
class _Watched:
    """A process that has timers."""

    pidfd: int
    #: By scope, in the order in which they were acquired.
    timers: dict[str, list[TimerRequest]] = field(default_factory=dict)

    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


class LocalTimerServer(TimerServer):
    """Kills processes of this machine whose timers have expired.

    A process is held by its pidfd while it has timers: if it dies without releasing them, its pid
    may belong to another process when they expire.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._watched: dict[int, _Watched] = {}

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for request in timer_requests:
            if request.expiration_time < 0:
                self._release(request.worker_id, request.scope_id)
            elif (watched := self._watch(request.worker_id)) is not None:
                watched.timers.setdefault(request.scope_id, []).append(request)

    def clear_timers(self, worker_ids: set[int]) -> None:
        for pid in worker_ids & self._watched.keys():
            os.close(self._watched.pop(pid).pidfd)

    def get_expired_timers(self, deadline: float) -> dict[int, list[TimerRequest]]:
        found: dict[int, list[TimerRequest]] = {}
        for request in self._requests():
            if request.expiration_time <= deadline:
                found.setdefault(request.worker_id, []).append(request)
        return found

    def next_deadline(self) -> float | None:
        return min((request.expiration_time for request in self._requests()), default=None)

    def stop(self) -> None:
        super().stop()
        self.clear_timers(set(self._watched))

    def _requests(self) -> Iterator[TimerRequest]:
        for watched in self._watched.values():
            for held in watched.timers.values():
                yield from held

    def _reap_worker(self, worker_id: int) -> bool:
        return self._send_signal(worker_id, signal.SIGKILL)

    def _send_signal(self, worker_id: int, signum: int) -> bool:
        try:
            signal.pidfd_send_signal(self._watched[worker_id].pidfd, signum)
        except ProcessLookupError:
            log.info("Process %d has already exited.", worker_id)
        except PermissionError as error:
            log.error("Could not kill process %d: %s.", worker_id, error)
            return False
        return True

    def _watch(self, pid: int) -> _Watched | None:
        """Return the process with this pid; None if it has ended."""
        known = self._watched.get(pid)
        if known is not None and known.has_ended():
            self.clear_timers({pid})  # of the process that had this pid before
        if pid not in self._watched:
            try:
                self._watched[pid] = _Watched(os.pidfd_open(pid))
            except OSError as error:
                log.info("Could not watch process %s: %s.", pid, error)
                return None
        return self._watched[pid]

    def _release(self, pid: int, scope: str) -> None:
        watched = self._watched.get(pid)
        if watched is None or scope not in watched.timers:
            return
        watched.timers[scope].pop()
        if not watched.timers[scope]:
            del watched.timers[scope]
        if not watched.timers:
            self.clear_timers({pid})
