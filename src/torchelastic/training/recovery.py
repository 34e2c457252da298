"""Choose the state to continue from, if the workers of a world do not have every part of it.

    candidates    all workers exchange what their agents hold, rank 0 adds the newest checkpoint's
                  step; `snapshot.restore.choices` puts the candidates in the same order on all
    is_loaded     each worker looks for its part of a version in memory, and all exchange the result
                      all have it                       load it, survivors too
                      it is damaged                     the next candidate
                      it exists, but was not received   an error: the next world tries again

Without sharded state the only candidate is the checkpoint.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torchelastic.errors import SnapshotError
from torchelastic.snapshot.keeper import newest_stored, nodes_of, told
from torchelastic.snapshot.layout import Version, shard
from torchelastic.snapshot.restore import (
    Absent,
    Agreement,
    Choice,
    Nodes,
    Outcome,
    PieceReader,
    SearchReport,
    StoredCheckpoint,
    absence,
    agreed,
    choices,
)
from torchelastic.tensors import agreement
from torchelastic.training.session import Session
from torchelastic.training.sharded.base import missing_parts
from torchelastic.training.sharded.part_snapshots import PartSnapshots, whole_versions
from torchelastic.training.state.state import FIRST, TORN

log = logging.getLogger(__name__)


class StateSearch:
    """The search of one world; collective."""

    def __init__(self, here: Session, snapshots: PartSnapshots | None) -> None:
        self._here, self._snapshots = here, snapshots
        self._node = ""
        self._nodes: Nodes = {}

    def candidates(self) -> list[Choice]:
        """Return what to try, in this order."""
        here = self._here
        if self._snapshots is None or here.agent is None or here.replica is None:
            return [StoredCheckpoint()]
        self._snapshots.wait_until_sealed()
        inventory = here.agent.inventory()
        self._node = inventory.node
        said = self._gather([*told(inventory), newest_stored() if here.rank == 0 else None])
        self._nodes = nodes_of(said)
        return choices(whole_versions(self._nodes, here.replica.size), said[0][3])

    def is_loaded(self, version: Version) -> bool:
        """Load a version from memory; return False if its snapshots are damaged."""
        assert self._snapshots is not None
        try:
            report = self._find(self._snapshots, version)
            said = [SearchReport.from_json(one) for one in self._gather(report.to_json())]
            verdict = agreed(said, (), sharded=True)
            if verdict is Agreement.TRY_AGAIN:
                raise SnapshotError(absence(version, said))
            if verdict is Agreement.LOAD:
                self._snapshots.load()
            return verdict is Agreement.LOAD
        finally:
            self._snapshots.forget()

    def _find(self, snapshots: PartSnapshots, version: Version) -> SearchReport:
        here = self._here
        assert here.replica is not None
        piece = shard(here.rank % here.replica.size)
        try:
            snapshots.find(piece, version, PieceReader(here.agent, self._node, self._nodes))
        except SnapshotError as error:
            log.warning("This worker cannot use the snapshot of step %d: %s", version[1], error)
            outcome = Outcome.ABSENT if isinstance(error, Absent) else Outcome.UNUSABLE
            return SearchReport(outcome, self._node, sentence=str(error))
        return SearchReport(Outcome.FOUND, self._node)

    def _gather(self, said: Any) -> list[Any]:
        joint: Any = self._here.group.joint
        return agreement.gather(said, self._here.size, partial(_all_gather, joint))


def _all_gather(joint: Any, everybodys: Any, mine: Any) -> None:
    joint.allgather([everybodys], [mine]).wait()


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
