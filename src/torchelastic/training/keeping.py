"""Run + keep: a script's state, kept in memory of its agent's and taken from there after a restart.

    restore   all ranks tell what their nodes hold; `keeping_plan` says what to go on from
              each rank finds and checks its pieces of it, and says whether it could; of tensors
              that are sharded it takes its parts out of all ranks' pieces (`keeping_reshard`)
              all could: everybody loads.  One could not: everybody tries the next
              nothing in any memory: the latest checkpoint, read by rank 0 and sent to all
              something, but nobody can use it, and no checkpoint: an error, not step 0
    commit    `keeping_writer`

A worker without an agent keeps nothing: it counts its steps, and checkpoints are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torchelastic import checkpoint, env, faults, stalls
from torchelastic.checkpoint.background import store_for_shards
from torchelastic.checkpoint.manager import Saved
from torchelastic.errors import CheckpointError, SnapshotError
from torchelastic.snapshot.layout import SHARED, Held, Memory, Version, own
from torchelastic.snapshot.messages import Holding, Holdings, Settled
from torchelastic.training import keeping_exchange as exchange
from torchelastic.training import keeping_reshard, private, transfer
from torchelastic.training.buffers import Buffers
from torchelastic.training.keeping_agent import Holder
from torchelastic.training.keeping_dtensor import Sharded
from torchelastic.training.keeping_plan import (
    Node,
    Nodes,
    bases,
    lacking,
    source,
    without_shards,
)
from torchelastic.training.keeping_reshard import Assembly
from torchelastic.training.keeping_shards import Piece, Shards
from torchelastic.training.keeping_tree import Stored, Tree
from torchelastic.training.keeping_writer import Place, Standing, Writer

log = logging.getLogger(__name__)

#: Up to this many bytes the checksum of a snapshot is looked at before it is loaded. Of more it
#: would take longer than to load them: it is looked at meanwhile, and before the next commit.
CHECKED_FIRST = 32 << 20
#: Where a training begins that nothing is known of.
NOTHING: Version = (-1, 0)


@dataclass
class _Found:
    """The pieces of a version, found whole. The memories stay open until they are loaded."""

    shared: Stored
    own: private.Private | None
    memories: list[Memory]
    #: What has yet to be checked.
    unchecked: Held | None
    #: The tensors that are sharded, and where their parts are.
    targets: Sharded
    shards: Assembly | None = None

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


class Keeper:
    """Keeps one state, in one worker of one generation."""

    def __init__(
        self,
        state: Saved,
        tree: Tree,
        buffers: Buffers,
        optimizers: Sequence[Optimizer],
        holder: Holder | None,
        *,
        shards: Shards,
        before_seal: Callable[[float], bool] | None = None,
    ) -> None:
        """`before_seal` is called in a thread before a snapshot counts, with seconds to wait at
        most; false if they were not enough."""
        faults.load()
        self._before_seal = before_seal
        self._state, self._tree, self._buffers, self._holder = state, tree, buffers, holder
        self._private = private.Reader(buffers).read
        self._shards = shards
        #: Those who vote on whether shards are kept; None: the default group.
        self._voters: ProcessGroup | None = None
        self.rank, self.size = exchange.place()
        self.generation = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._first = False
        self._writer: Writer | None = None
        self._committed: Version = NOTHING
        #: What was loaded, as long as it is not known to be whole.
        self._doubt: tuple[_Found, Future[bool]] | None = None
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_write)
        if holder is None:
            log.info("No agent holds memory for this process: commit() only counts steps.")

    def _before_write(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.before_write()

    @property
    def committed(self) -> Version:
        """The last version that was committed, or gone on from."""
        return self._committed

    @property
    def writes_whole_state(self) -> bool:
        """Whether this worker writes what is shared on its node, and that is all there is."""
        return self._first and not self._shards.any

    # --- commit ----------------------------------------------------------------------------------

    def check(self, step: int) -> None:
        """`ValueError` unless this step may be committed."""
        if (self.generation, step) <= self._committed:
            raise ValueError(
                f"Step {step} cannot be committed after step {self._committed[1]}: steps are "
                "committed in order, and each once."
            )

    def commit(self, step: int) -> None:
        """So many steps are done, which `check` has let pass: publish the state."""
        self._committed = version = (self.generation, step)
        if faults.planned:
            faults.position(rank=self.rank, step=step, generation=self.generation)
        if self._holder is not None and self._writer is not None:
            with stalls.Counted("snapshot"):
                self._keep(self._writer, version)
            self._holder.progress(version, self.rank)
        self._save_if_due(step)

    def _save_if_due(self, step: int) -> None:
        """Of what is the same on all ranks rank 0 takes checkpoints, of shards all together."""
        if not self._shards.any:
            if self.rank == 0 and checkpoint.is_due(step):
                checkpoint.save(self._state, step, self.generation)
        elif checkpoint.is_due(step, together=True):
            self._shards.reshard()
            own = private.pack(self._private())
            checkpoint.save_together(self._state, step, self.generation, own)

    def _keep(self, writer: Writer, version: Version) -> None:
        self._resolve_doubt(writer)
        if not self._shards.any or self._all_may_begin(writer):
            self._publish(writer, version)

    def _publish(self, writer: Writer, version: Version) -> None:
        self._shards.reshard()
        flat = self._tree.flatten() if self._first else None
        shards = None
        if self._shards.any:
            shards = self._shards.flatten(self._tree.form, self._tree.sharded())
        writer.publish(version, flat, private.pack(self._private()), shards)

    def _all_may_begin(self, writer: Writer) -> bool:
        """Collective: whether a version of the shards is begun; all ranks come to the same."""
        least = exchange.least(writer.standing(), self._voters)
        return writer.may_begin(Standing(least))

    def _resolve_doubt(self, writer: Writer) -> None:
        """Nothing is committed that was made from a damaged snapshot."""
        if self._doubt is None:
            return
        (found, checked), self._doubt = self._doubt, None
        whole, held = checked.result(), found.unchecked
        if not whole and held is not None:
            writer.drop(held)
        found.close()
        if not whole:
            raise SnapshotError(
                "The snapshot that this worker went on from is damaged. It is dropped: the next "
                "generation goes on from another one."
            )

    # --- restore ---------------------------------------------------------------------------------

    def restore(self) -> int | None:
        """Bring all ranks to the freshest state there is; its step, None if there is none."""
        checkpoint.before_write()
        with stalls.Counted("restore"):
            base, found = self._restore()
        self._begin(base or NOTHING, found)
        return base[1] if base is not None else None

    def _restore(self) -> tuple[Version | None, _Found | None]:
        """The version that was loaded, and what is yet to be done with where it was found."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._shards.any:
            self._prepare_shards()
        here, nodes = self._tell_each_other()
        self._first = nodes[here].first == self.rank
        choices = bases(nodes, self.size)
        found, base = self._from_memory(here, nodes, choices)
        base = base or self._from_checkpoint()
        if base is None:
            _refuse_to_begin_anew(choices, without_shards(nodes))
        return base, found

    def _begin(self, base: Version, found: _Found | None) -> None:
        """All ranks go on from here."""
        self._committed = max(self._committed, (self.generation, base[1]))
        if self.rank == 0:
            checkpoint.entered(self.generation, base[1])
        if self._holder is None:
            return
        self._holder.tell(Settled(base, self.generation))
        self._holder.progress((self.generation, base[1]), self.rank)
        place = Place(self.rank, self.size, self.generation, self._first, base)
        self._writer = Writer(self._holder, place, self._before_seal)
        if found is not None and found.unchecked is not None:
            self._doubt = found, self._writer.check(found.unchecked)
        elif found is not None:
            found.close()

    def _prepare_shards(self) -> None:
        store_for_shards()
        self._shards.reshard()
        self._voters = exchange.quick_group()

    def _tell_each_other(self) -> tuple[str, Nodes]:
        """Collective: the name of this node, and what all of them hold."""
        holdings = self._inventory()
        # With --virtual-local-rank all are 0, and say the same.
        speaks = env.get("LOCAL_RANK", "0") == "0"
        told = [
            [held.piece, *held.version, held.bytes, held.rank, held.size]
            for held in holdings.holdings
        ]
        said = exchange.gather([holdings.node, holdings.peer, told if speaks else []])
        return holdings.node, nodes_of(said)

    def _inventory(self) -> Holdings:
        # An agent that does not answer is an error: without what it holds all would go back.
        if self._holder is not None:
            return self._holder.inventory()
        return Holdings(0, (), node=f"rank {self.rank}")

    def _from_memory(
        self, here: str, nodes: Nodes, choices: Sequence[Version]
    ) -> tuple[_Found | None, Version | None]:
        for version in choices:
            found = self._find(here, nodes, version)
            if self._shards.any:
                found = self._find_shards(found, here, nodes, version)
            if exchange.all_of_them(found is not None) and found is not None:
                self._load(found, version, lacking(nodes, version, self.size))
                return found, version
            if found is not None:
                found.close()
        return None, None

    def _find(self, here: str, nodes: Nodes, version: Version) -> _Found | None:
        """This rank's pieces of a version, checked; None, and the log says why, if it cannot."""
        memories: list[Memory] = []
        try:
            shared = self._held(here, nodes, SHARED, version, memories)
            if shared is None:
                raise SnapshotError("no node that has it can be reached")
            stored = self._tree.read(shared.skeleton, shared.data)
            targets = self._shards.targets(stored.sharded(), self._tree.sharded())
            mine = self._held(here, nodes, own(self.rank), version, memories)
            left = private.unpack(bytes(mine.data)) if mine is not None else None
            # One worker of a node looks for all: if it fails, all of them begin anew.
            later = self._first and len(shared.data) > CHECKED_FIRST
            return _Found(stored, left, memories, shared if later else None, targets)
        except SnapshotError as error:
            log.warning("The snapshot of step %d cannot be used here: %s", version[1], error)
            for memory in memories:
                memory.close()
            return None

    def _find_shards(
        self, found: _Found | None, here: str, nodes: Nodes, version: Version
    ) -> _Found | None:
        """Collective: find this rank's parts of what is sharded; None if it cannot."""
        memories: list[Memory] = found.memories if found is not None else []

        def opened(piece: str) -> Piece:
            held = self._held(here, nodes, piece, version, memories)
            if held is None:
                raise SnapshotError("no node that has it can be reached")
            return Piece.read(self._tree.form, held.skeleton, held.data)

        targets = found.targets if found is not None else None
        shards = keeping_reshard.find(targets, self.rank, nodes, version, opened)
        if found is not None and shards is not None:
            found.shards = shards
            return found
        for memory in memories:
            memory.close()
        return None

    def _held(
        self, here: str, nodes: Nodes, piece: str, version: Version, memories: list[Memory]
    ) -> Held | None:
        """A piece, wherever it is; None if nobody has it."""
        name = source(nodes, here, piece, version)
        if name is None or self._holder is None:
            return None
        memory = self._holder.open(piece, version, "" if name == here else nodes[name].peer)
        memories.append(memory)
        held = memory.find(version)
        later = piece == SHARED and held is not None and len(held.data) > CHECKED_FIRST
        if held is None or not (later or held.is_whole()):
            raise SnapshotError(f"the memory of '{piece}' is damaged")
        return held

    def _load(self, found: _Found, version: Version, lost: Sequence[int]) -> None:
        if found.shards is not None:
            found.shards.copy()
            found.shards = None
        self._tree.load(found.shared, found.targets)
        self._buffers.find()
        if found.own is not None:
            private.restore(found.own, self._buffers)
        log.info("Going on from step %d, found in memory.", version[1])
        if lost and self.rank == 0:
            log.warning(
                "What ranks %s had of their own at step %d is lost: their random states are those "
                "the script has made.",
                ", ".join(map(str, lost)),
                version[1],
            )

    def _from_checkpoint(self) -> Version | None:
        """Rank 0 reads it and sends it: storage need not be shared, nor be read by all. But of
        what is sharded each rank reads its part."""
        if self._shards.any:
            return self._shards_from_checkpoint()
        step: int | None = None
        wrong = ""
        if self.rank == 0 and checkpoint.get_checkpoint_manager() is not None:
            try:
                step = checkpoint.load_latest(self._state)
            except CheckpointError as error:
                wrong = str(error)
        step, wrong = exchange.gather([step, wrong])[0]
        if wrong:
            raise CheckpointError(wrong)
        if step is None:
            return None
        if self.size > 1:
            self._share()
        return (NOTHING[0], step)

    def _shards_from_checkpoint(self) -> Version | None:
        step: int | None = None
        wrong = ""
        try:
            loaded = checkpoint.load_together(self._state)
        except CheckpointError as error:
            wrong = str(error)
        else:
            step, left = loaded if loaded is not None else (None, None)
            self._buffers.find()
            if left is not None:
                private.restore(private.unpack(left), self._buffers)
        if sentences := [one for one in exchange.gather(wrong) if one]:
            raise CheckpointError(sentences[0])
        return None if step is None else (NOTHING[0], step)

    def _share(self) -> None:
        """Collective: give rank 0's state to all."""
        world: Any = SimpleNamespace(rank=self.rank, size=self.size, received=0)
        own_tree = self._tree.whole()
        tree = own_tree if self.rank == 0 else None
        received = transfer.share(world, tree, holders=[0], into=own_tree if self.rank else None)
        if self.rank != 0:
            self._tree.put(received)


def _refuse_to_begin_anew(unusable: Sequence[Version], lost: Sequence[Version]) -> None:
    """Nobody begins at step 0 while there are snapshots."""
    if unusable:
        raise SnapshotError(
            f"There are snapshots up to step {unusable[0][1]}, but not all ranks can use one "
            "(their logs say why), and there is no checkpoint. To begin anew is for you to "
            "decide: end the job and start it again."
        )
    if lost:
        raise SnapshotError(
            f"There are snapshots up to step {lost[0][1]}, but shards of them were lost with their "
            "nodes, and there is no checkpoint. To begin anew, or from a checkpoint of your own, "
            "is for you to decide: end the job and start it again."
        )


def nodes_of(said: Sequence[Any]) -> dict[str, Node]:
    """The nodes of a world, by what each rank says: its node, the agent's address, what is held."""
    found: dict[str, Node] = {}
    for rank, (name, peer, told) in enumerate(said):
        holdings = tuple(
            Holding(piece, (generation, step), size, writer, world)
            for piece, generation, step, size, writer, world in told
        )
        known = found.get(name)
        if known is None or (holdings and not known.holdings):
            found[name] = Node(peer, holdings, known.first if known is not None else rank)
    return found
