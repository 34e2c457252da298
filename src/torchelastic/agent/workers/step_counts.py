"""Optimizer steps of scripts that report none: status pages on which workers count them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from torchelastic.worker import status_page


@dataclass(frozen=True)
class _Handed:
    descriptor: int
    #: The generation and the rank of the worker.
    place: tuple[int, int]


class CountedSteps:
    """Counted steps by local rank. They show progress; no worker is killed because of them."""

    def __init__(self) -> None:
        self._handed: dict[int, _Handed] = {}
        #: The newest generation in which a worker has taken a step.
        self.newest = -1

    def handed(self, local_rank: int, place: tuple[int, int], descriptor: int) -> None:
        """Take over the status page of a worker that has taken its first step."""
        self.forget(local_rank)
        self._handed[local_rank] = _Handed(descriptor, place)
        self.newest = max(self.newest, place[0])

    def forget(self, local_rank: int) -> None:
        """Drop a worker that is replaced, or reports its steps itself from now on."""
        known = self._handed.pop(local_rank, None)
        if known is not None:
            os.close(known.descriptor)

    def close(self) -> None:
        for local_rank in list(self._handed):
            self.forget(local_rank)

    def shown(self) -> dict[int, status_page.ShownStatus]:
        """The status of each worker by local rank, as on the agent's own status pages."""
        looked = {local_rank: self._look(local_rank) for local_rank in self._handed}
        return {local_rank: one[0] for local_rank, one in looked.items() if one is not None}

    def seen(self, local_rank: int) -> tuple[int, int, float, int] | None:
        """Generation, step and time of the last step that was taken, and the first step."""
        if (found := self._look(local_rank)) is None:
            return None
        shown, first = found
        return shown.generation, shown.step, shown.at, first

    def _look(self, local_rank: int) -> tuple[status_page.ShownStatus, int] | None:
        if (known := self._handed.get(local_rank)) is None:
            return None
        generation, rank = known.place
        before = status_page.read_taken(known.descriptor)
        shown = status_page.read(known.descriptor)
        first = status_page.read_first_step(known.descriptor)
        if shown.step < 0:  # the worker has truncated its memory
            return None
        return replace(shown, generation=generation, rank=rank, before=before), first
