"""`train`: continue from memory or storage if the workers of a world do not have the whole state.

The search is that of `restore` (`snapshot.search`). The candidates of a sharded state are the parts
that the agents hold, which all workers load, survivors too; and the newest checkpoint, which rank 0
or the first replica loads and then sends. A state that is not sharded is in the memory of all
workers: if none of them has it, the only candidate is the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torchelastic.snapshot.layout import Version, shard
from torchelastic.snapshot.pieces import FoundPieces, Searcher
from torchelastic.snapshot.restore import newest_stored
from torchelastic.snapshot.search import (
    Choice,
    Nodes,
    SearchReport,
    StoredCheckpoint,
    choices,
    search_together,
    tell_each_other,
    whole_versions,
)
from torchelastic.tensors import agreement
from torchelastic.training.session import Session
from torchelastic.training.sharded.part_snapshots import PartSnapshots
from torchelastic.training.state import FIRST, TORN, missing_parts

log = logging.getLogger(__name__)


class StateRecovery:
    """The search of one worker in one world."""

    def __init__(
        self,
        here: Session,
        snapshots: PartSnapshots | None,
        load_checkpoint: Callable[[int], int | None],
        loaded: Callable[[Version], None],
    ) -> None:
        """`load_checkpoint` loads the checkpoint beyond a step, and returns its step on all ranks;
        `loaded` is called when this worker has loaded a version from memory."""
        self._here, self._snapshots = here, snapshots
        self.from_storage, self._loaded = load_checkpoint, loaded
        self._searcher: Searcher | None = None
        self._found: FoundPieces | None = None

    def run(self) -> None:
        """Collective: bring the workers to the freshest state."""
        lost = loss(self._here)
        tried, nodes = self._candidates()
        search_together(tried, self, self._gather, nodes, sharded=True)
        if self._here.rank == 0:
            explain(self._here.freshest, lost)

    def _candidates(self) -> tuple[list[Choice], Nodes]:
        here, snapshots = self._here, self._snapshots
        if snapshots is None or here.agent is None or here.replica is None:
            return [StoredCheckpoint()], {}
        snapshots.wait_until_sealed()
        inventory = here.agent.inventory()
        stored = newest_stored() if here.rank == 0 else None
        nodes, told = tell_each_other(self._gather, inventory, stored)
        piece = shard(here.rank % here.replica.size)
        self._searcher = Searcher(
            here.agent, snapshots.tree, here.rank, inventory.node, nodes, piece=piece
        )
        return choices(whole_versions(nodes, here.replica.size), told[0][0]), nodes

    def look(self, version: Version) -> SearchReport:
        assert self._searcher is not None
        self._found, report = self._searcher.search(version)
        return report

    def load(self, version: Version, said: Sequence[SearchReport]) -> None:
        assert self._snapshots is not None
        assert self._found is not None
        try:
            self._snapshots.load(self._found.shared)
        finally:
            self.drop()
        self._loaded(version)

    def drop(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            found.close()

    def _gather(self, said: Any) -> list[Any]:
        joint: Any = self._here.group.joint

        def all_gather(everybodys: Any, mine: Any) -> None:
            joint.allgather([everybodys], [mine]).wait()

        return agreement.gather(said, self._here.size, all_gather)


def loss(here: Session) -> str:
    """Return which state no worker of a sharded training has; empty if none had trained."""
    best = max(here.versions)
    if here.replica is None or best[0] < 0:
        return ""
    parts = ", ".join(map(str, missing_parts(here.versions, best, here.replica.size)))
    return f"no worker has part {parts} of the state at step {best[1]} any more"


def explain(base: Version, lost: str) -> None:
    """Say what a training continues from. `lost` is the `loss` of this world."""
    if base[0] >= 0:
        origin = f"step {base[1]}, from snapshots in memory"
        lost = lost or "no worker has the state any more"
    elif base > FIRST:
        origin = f"the checkpoint of step {base[1]}"
    else:
        origin = "step 0, because there is no snapshot and no checkpoint"
    if lost and base != TORN:
        log.warning(
            "Training continues from %s: %s. With two replicas every part is in memory twice.",
            origin,
            lost,
        )
