"""A thread that kills workers whose timers have expired, for processes without an agent."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from torchelastic.timer.timer_requests import RequestQueue, TimerRequest

log = logging.getLogger(__name__)

#: Seconds to wait before trying again to kill a worker.
TRY_AGAIN = 1.0


class TimerServer(ABC):
    """Takes requests from a queue, and kills workers whose timers expire.

    Its thread waits for the next request or the next deadline, but at most `max_interval` seconds:
    servers without `next_deadline` check that often.
    """

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = threading.Event()

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Register acquired timers, and remove released ones (negative `expiration_time`)."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Return the timers that expire by `deadline` (`time.monotonic()`), by worker."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """Kill a worker; False if that failed and should be tried again."""

    def next_deadline(self) -> float | None:
        """The time when the next timer expires; None if there is none or it is unknown."""
        return None

    # --- the thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start watching."""
        if self._watchdog_thread is not None:
            raise RuntimeError("The timer server is already running: stop it first.")
        self._stop_signaled.clear()
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, name="torchelastic-timers", daemon=self._daemon
        )
        self._watchdog_thread.start()

    def stop(self) -> None:
        """Stop watching; return when the thread has ended."""
        self._stop_signaled.set()
        if self._watchdog_thread is not None:
            self._request_queue.wake()
            self._watchdog_thread.join()
            self._watchdog_thread = None

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled.is_set():
            try:
                self._run_watchdog()
            except Exception:
                # An error in one request must not leave all workers unwatched.
                log.exception("The timer server continues after an error.")
                self._stop_signaled.wait(TRY_AGAIN)

    def _run_watchdog(self) -> None:
        wanted = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(wanted, self._patience(time.monotonic())))
        reaped = {
            worker_id
            for worker_id, expired in self.get_expired_timers(time.monotonic()).items()
            if self._reaps(worker_id, expired)
        }
        self.clear_timers(reaped)

    def _patience(self, now: float) -> float:
        """Seconds to wait for a request."""
        due = self.next_deadline()
        if due is None:
            return self._max_interval
        if due <= now:  # its worker could not be killed
            return min(TRY_AGAIN, self._max_interval)
        return min(due - now, self._max_interval)

    def _reaps(self, worker_id: Any, expired: list[TimerRequest]) -> bool:
        scopes = ", ".join(f"'{request.scope_id}'" for request in expired)
        log.warning("Killing worker %s: timer %s expired.", worker_id, scopes)
        try:
            return self._reap_worker(worker_id)
        except Exception:
            log.exception("Could not kill worker %s; its timers are dropped.", worker_id)
            return True
