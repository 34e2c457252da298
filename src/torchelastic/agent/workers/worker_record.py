"""The record of the worker of one local rank, as its agent keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchelastic.agent.output.log_files import GenerationLogs
from torchelastic.worker import collective_log, error_file, orders, status_page


@dataclass
class WorkerRecord:
    """The facts about one worker. `successor` is the record of the worker that replaces it."""

    local_rank: int
    #: The world it was started for or last told to enter; -1 for a standby worker.
    generation: int = -1
    rank: int = -1
    #: True if it has called `torchelastic.train`: a control thread answers for it.
    in_process: bool = False
    #: The generation it was told to enter, and when, until it leaves that.
    told_to_enter: tuple[int, float] | None = None
    #: The generation in which it reported to train, until it leaves that.
    trains_in: int | None = None
    #: The last step it has reported.
    step: int | None = None
    #: True if it has left its world since it was told that it is over.
    has_stopped: bool = False
    #: True if it was told that the training is done.
    is_done: bool = False
    #: Its last answer to a `Ping`.
    pong: orders.Pong | None = None
    #: The error it sent on its channel: the only source if log files are off.
    sent_error: error_file.ErrorRecord | None = None
    #: Why we killed it, and its stack.
    verdict: error_file.ErrorRecord | None = None
    #: True if we killed it because it did not leave a world that was over.
    cut_off: bool = False
    #: When its program returned.
    returned_at: float | None = None
    #: True if it was already exiting when all workers were told to stop.
    exits_by_itself: bool = False
    logs: GenerationLogs | None = None
    #: The descriptor of its status page: memory that outlives the worker, for its successor.
    page: int | None = None
    #: The progress that its predecessor has left on the status page.
    inherited: tuple[int, int, float] | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The generation and the rank it has now."""
        return self.generation, self.rank

    def successor(self, generation: int, rank: int) -> WorkerRecord:
        """The record of the next worker with this local rank."""
        return WorkerRecord(
            self.local_rank, generation, rank, page=self.page, inherited=self.inherited
        )

    # --- what it was told and has reported -------------------------------------------------------

    def told(self, order: orders.Order, now: float) -> None:
        """Note an order that is sent to it."""
        match order:
            case orders.Enter():
                self.generation, self.rank = order.generation, order.rank
                self.told_to_enter = (order.generation, now)
                self.has_stopped = self.is_done = False
            case orders.Over():
                self.has_stopped = False
                self.is_done = self.is_done or order.finished

    def left(self, generation: int, now: float) -> None:
        """Note that it has left this generation; if it was told to enter a later one, it starts to
        enter now."""
        if self.trains_in is not None and self.trains_in <= generation:
            self.trains_in = None
        if self.told_to_enter is not None:
            entering = self.told_to_enter[0]
            self.told_to_enter = (entering, now) if entering > generation else None

    def error(self) -> tuple[str, error_file.ErrorRecord | None]:
        """Its error file and its error; our own reason for killing it comes first."""
        if self.verdict is not None:
            return "", self.verdict
        path = self.logs.streams[self.local_rank].error_file if self.logs is not None else ""
        return path, error_file.read(path) if path else self.sent_error

    # --- what its status page shows --------------------------------------------------------------

    def progress(self) -> tuple[int, int, float] | None:
        """Generation, step and time of the last step it has entered."""
        return status_page.read_progress(self.page) if self.page is not None else None

    def first_step(self) -> int:
        """The first step of the generation that `progress` returns."""
        return status_page.read_first_step(self.page) if self.page is not None else -1

    def newest_step(self) -> int | None:
        """The step it is in, or has last reported."""
        generation, step, _ = self.progress() or (-1, -1, 0.0)
        return step if generation == self.generation >= 0 else self.step

    def entering_since(self) -> float | None:
        """When it started to enter the world it was last told to enter. None: it has entered a
        step there, or will not enter. Infinite: it finishes a step of the world before, which it
        said may take any time."""
        generation, told = self.told_to_enter or (-1, 0.0)
        shown, _, entered = self.progress() or (-1, -1, math.inf)
        if shown >= generation:
            return None
        if entered == math.inf:
            # Otherwise an evaluation would look like a hang of all workers.
            return math.inf if self.trains_in is not None else told
        return max(told, entered)

    def collectives(self) -> collective_log.ShownCollectives:
        """The collectives of its generation, as far as it shows them."""
        shown = collective_log.read(self.page) if self.page is not None else None
        if shown is None or shown.generation != self.generation:
            return collective_log.ShownCollectives(self.generation, None, ())
        return shown
