"""The agent and local rank of each rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchelastic.events import types as events
from torchelastic.events.record import Record


@dataclass(frozen=True, order=True)
class RankLocation:
    """The agent and local rank of a worker in a generation."""

    rank: int
    #: The id of its agent.
    agent: str
    local_rank: int


@dataclass
class RankLocations:
    """The places of one generation: the wanted one, or the last."""

    wanted: int | None = None
    generation: int = -1
    _workers: dict[str, int] = field(default_factory=dict)
    _ranks: dict[str, set[int]] = field(default_factory=dict)

    def feed(self, record: Record) -> None:
        if isinstance(record.event, events.AgentStarted):
            self._workers[record.node] = record.event.nproc
        generation = record.generation if record.generation is not None else -1
        if self.wanted is not None and generation != self.wanted:
            return
        ranks = _ranks_in(record.event)
        if ranks and generation >= self.generation:
            if generation > self.generation:
                self.generation = generation
                self._ranks.clear()
            self._ranks.setdefault(record.node, set()).update(ranks)

    def known(self) -> list[RankLocation]:
        """Return places by rank, of nodes whose ranks are all known: local ranks follow ranks."""
        return sorted(
            RankLocation(rank, agent, local_rank)
            for agent, ranks in self._ranks.items()
            if len(ranks) == self._workers.get(agent, len(ranks))
            for local_rank, rank in enumerate(sorted(ranks))
        )


def _ranks_in(event: events.Event | None) -> list[int]:
    match event:
        case events.WorkersStarted(ranks=ranks) | events.Progress(ranks=ranks):
            return list(ranks)
        case events.Training(rank=rank):
            return [rank]
    return []
