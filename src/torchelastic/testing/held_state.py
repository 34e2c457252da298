"""The copies of the state that the workers of a job have, for the checker of the laws. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class HeldState:
    """The newest step that each worker has; of a sharded model, a worker has one shard of it."""

    def __init__(self, replica: int, workers: int) -> None:
        """`replica`: the number of workers in a replica, 0 if the model is not sharded; `workers`:
        on each node."""
        self._replica, self._workers = replica, workers
        self._steps: dict[str, dict[int, int]] = {}
        self._places: dict[str, int] = {}

    def hold(self, node: str, ranks: Iterable[int], step: int) -> None:
        held = self._steps.setdefault(node, {})
        for rank in ranks:
            held[rank] = max(held.get(rank, -1), step)

    def forget(self, node: str, ranks: Iterable[int] | None = None) -> None:
        """Forget what these workers have; None: all of the node."""
        held = self._steps.get(node, {})
        for rank in tuple(held) if ranks is None else ranks:
            held.pop(rank, None)

    def forget_all(self) -> None:
        self._steps.clear()

    def note_place(self, node: str, coordinate: int) -> None:
        """Note the place of a node among those of a replica."""
        self._places[node] = coordinate // self._workers

    @property
    def nodes(self) -> set[str]:
        return set(self._steps)

    def holders(self, nodes: Iterable[str], step: int) -> frozenset[str]:
        """Those of these nodes that have the step; empty if they do not have all shards of it."""
        size, workers = self._replica, self._workers
        if size <= workers:
            size = max(size, 1)
            blocks = [range(first, first + size) for first in range(0, workers, size)]
            return frozenset(n for n in nodes if any(self._has(n, block, step) for block in blocks))
        whole = frozenset(node for node in nodes if self._has(node, range(workers), step))
        places = {self._places.get(node) for node in whole}
        return whole if len(places) == size // workers else frozenset()

    def _has(self, node: str, ranks: Iterable[int], step: int) -> bool:
        held = self._steps.get(node, {})
        return all(held.get(rank, -1) >= step for rank in ranks)
