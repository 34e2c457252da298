"""`TorchState`: a ready-made State from a model, optimizers and other parts of a training."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchelastic import checkpoint, torch_private
from torchelastic.data.fixed_batch import FixedBatch
from torchelastic.data.ledger import Ledger
from torchelastic.errors import ConfigError, NonRetryableException
from torchelastic.snapshot import agent_client
from torchelastic.snapshot.keeper import Keeper
from torchelastic.snapshot.own_checkpoints import steps_taken
from torchelastic.snapshot.shards import Shards, put_in, shape_of
from torchelastic.snapshot.state_tree import Tree
from torchelastic.tensors import (
    agreement,
    foreign_shards,
    module_state,
    rank_private,
    tensor_tree,
    transfer,
)
from torchelastic.tensors.buffers import Buffers
from torchelastic.tensors.dtensors import is_sharded
from torchelastic.tensors.module_state import parameters_of
from torchelastic.tensors.rank_private import Private, Publisher
from torchelastic.tensors.small_state import Hyperparameters, Saver, Value, saver_of
from torchelastic.tensors.tensor_bytes import bytes_of, sha256_of
from torchelastic.training import parts, session
from torchelastic.training.fixed_steps import FixedSteps, InReplica
from torchelastic.training.group import ddp
from torchelastic.training.parts import (
    FORMAT,
    OPTIMIZER,
    cut_like,
    is_trained,
    like,
    members,
    modules,
    optimizers_of,
    refuse_names,
    sort,
    state_of,
    stateful,
    stored,
    take_out_shards,
    written_by,
)
from torchelastic.training.session import Session
from torchelastic.training.sharded import mesh
from torchelastic.training.sharded.between import FullyShardedModels
from torchelastic.training.sharded.part_snapshots import PartSnapshots, PartTree
from torchelastic.training.sharded.rehearsal import rehearse
from torchelastic.training.sharded.shard_tree import from_shards, to_shards
from torchelastic.training.sharded.sharding import Peers, Sharding, copies
from torchelastic.training.state import (
    FIRST,
    TORN,
    State,
    Torn,
    Version,
    holders_of,
    is_worthless,
    missing_parts,
)
from torchelastic.training.state_checks import StateChecks
from torchelastic.training.step_guard import (
    ACTIONS,
    Action,
    BadStep,
    Guard,
    GuardHistory,
    response,
    why_it_ends,
)
from torchelastic.training.step_judge import FoundBad, StepJudge
from torchelastic.training.undo import Undo, UndoRecord
from torchelastic.worker.backward_waits import BackwardWaits
from torchelastic.worker.leaving import leaving
from torchelastic.worker_counters import milestones

log = logging.getLogger(__name__)

#: Parts that may be several: a list, a tuple or a dict of them.
_SEVERAL = ("model", "optimizer", "scheduler", "sampler", "scaler")
#: What is said of a bad step.
_DONE: dict[Action, str] = {
    "skip": "it is undone, and its samples are skipped",
    "retry": "it is undone and repeated",
    "stop": "it is undone, and training ends",
}


class TorchState(State):
    """A state made of parts, each available under its name: `state.model`, `state.optimizer`.

    `model`, `optimizer`, `scheduler`, `sampler` and `scaler` are one object each, or a list, tuple
    or dict of several. `step` is the number of committed steps, counted by the training loop; you
    count `epoch`. `more` parts are numbers, strings, tensors, arrays, lists, tuples, dicts, or
    objects with `state_dict` and `load_state_dict` made of these; anything else raises TypeError.
    You can assign values (`state.best = 0.93`), but not replace objects.

    In a world `state.model` is the model in DistributedDataParallel, reused in later worlds;
    `state.module` is the model itself. `ddp=False` does not wrap it, `ddp={...}` are DDP's options.

    A step is undone without a copy of the parameters: only `optimizer.step` writes to them and to
    optimizer state, and a collective of all ranks must come before every such write. With DDP the
    backward is one. A collective *after* a write in the same step (a second optimizer, a sharded
    one, a reduced loss) makes this class copy them before every write, and log a warning.
    `copy_before_write=True` copies from the beginning, `False` never.

    Anything outside the parts is lost when a step is undone and is not sent to new workers:
    averaged weights held elsewhere, iterators over data, the state of communication hooks and of
    hooks on modules, caches of `torch.compile`, generators other than the global ones of torch,
    Python and numpy, and attributes of modules that are neither parameters nor buffers. If a
    worker is killed before a step ends, its replacement does not know random numbers that were
    drawn after the last collective of the step.
    """

    model: Any
    optimizer: Any
    scheduler: Any
    sampler: Any
    scaler: Any
    step: int
    epoch: int
    _every_step = True

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        scaler: Any = None,
        step: int = 0,
        epoch: int = 0,
        ddp: bool | Mapping[str, Any] = True,
        copy_before_write: bool | None = None,
        ledger: Ledger | None = None,
        policy: FixedBatch | None = None,
        **more: Any,
    ) -> None:
        given = dict(zip(_SEVERAL, (model, optimizer, scheduler, sampler, scaler), strict=True))
        refuse_names(more, type(self))
        values, objects = sort(more)
        vars(self).update(given | more)
        self.step, self.epoch = step, epoch
        foreign_shards.refuse(members(model), members(optimizer))
        self._models, self._optimizers = modules(model), optimizers_of(optimizer)
        self._stateful = stateful(given | objects)
        #: Runs the micro-batches of `BatchPolicy.fixed`, which adds gradients without DDP.
        self._fixed = None if policy is None else self._fix(policy, model)
        self._ddp = ddp if policy is None else False
        self._wrapped: list[nn.Module] = []
        self._ddps: list[DistributedDataParallel] = []
        #: The DDP models of a script whose layout is kept.
        self._followed: list[DistributedDataParallel] = []
        #: The DDP models whose layout a committed step of this world may still change.
        self._changeable: list[DistributedDataParallel] = []
        self._version: Version = (FIRST[0], step)
        #: Whether no world was entered yet, and whether a step was undone since the last sync.
        self._newborn, self._interrupted = True, False
        self._values = ("epoch", *values)
        self._objects = {name: part for name, part in given.items() if part is not None} | objects
        self._copy_before_write = copy_before_write
        #: What a sharded model needs besides, in a training over a mesh of ours.
        self._sharding: Sharding | None = None
        #: The private state in the part that was just loaded from memory.
        self._kept_private: Private | None = None
        self._keeper: Keeper | None = None
        #: Parts to notify of every committed step.
        self._listeners = parts.listeners(self._stateful)
        #: Whether the optimizers wait until checkpoints have their copy.
        self._is_guarded = False
        self._ledger = ledger
        self._recorded = parts.recorded(self._stateful, ledger)
        self._guard = next((one for one in objects.values() if isinstance(one, Guard)), None)
        self._state_checks = self._checks_of(self._guard)
        self._audit(self._guard)
        solid = self._solid()
        #: The names of tensors that are sharded over ranks.
        self._sharded = take_out_shards(solid)
        if self._sharded and self._fixed is not None and mesh.current() is None:
            raise TypeError(
                f"{self._sharded[0]} is sharded over ranks: BatchPolicy.fixed works with sharded "
                "models only in torchelastic.train, over torchelastic.mesh."
            )
        for name, tree in solid.items():
            tensor_tree.check(name, tree)

    def _fix(self, policy: FixedBatch, model: Any) -> FixedSteps:
        if not isinstance(policy, FixedBatch):
            raise TypeError(
                "policy is only for BatchPolicy.fixed: pass other policies to the DataLoader alone."
            )
        if any(isinstance(one, DistributedDataParallel) for one in members(model)):
            raise TypeError(
                "With BatchPolicy.fixed, pass the plain module as model: DDP adds gradients in an "
                "order that depends on the number of workers."
            )
        steps = FixedSteps(policy, lambda: self.step)
        policy.attach(steps)
        return steps

    def _audit(self, guard: Guard | None) -> None:
        if guard is None or guard.config.audit is None:
            return
        if self._fixed is None:
            raise ConfigError(
                "Guard(audit=...) repeats micro-batches of a fixed batch: pass "
                "policy=BatchPolicy.fixed(...) to TorchState, too."
            )
        self._fixed.audits.rate = guard.config.audit

    #: The objects, which cannot be replaced, and the names of the values, which can.
    _objects: Mapping[str, Any] = MappingProxyType({})
    _values: tuple[str, ...] = ()

    @property
    def module(self) -> Any:
        """The model without DDP, as it was passed in."""
        return like(self._objects.get("model"), self._models)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._objects:
            raise AttributeError(
                f"Cannot replace '{name}', an object this state was made of: load a state_dict "
                "into it, or make a new TorchState."
            )
        if name in self._values:
            tensor_tree.check(name, value)
        super().__setattr__(name, value)

    @cached_property
    def _undo(self) -> Undo:
        """Made when a world is entered: a script does not need its hooks and copies."""
        place = parts.positions(self._stateful)
        savers = [
            *map(Hyperparameters, self._optimizers),
            *(saver_of(part) for name, part in self._stateful.items() if name not in place),
            *(Value(self, name) for name in self._values[1:]),
        ]
        position: list[Saver] = [Value(self, "epoch"), *map(saver_of, place.values())]
        copy = self._copy_before_write
        return Undo(self._models, self._optimizers, savers, position, copy=copy)

    @cached_property
    def _judge(self) -> StepJudge | None:
        """Made with `_undo`."""
        if self._guard is None:
            return None
        fixed, writes = self._fixed, self._undo.writes
        scalers = [one for one in self._stateful.values() if isinstance(one, torch.amp.GradScaler)]
        judge = writes.judge = StepJudge(
            self._guard,
            self._undo.gradients.of_this_step,
            scalers,
            self._models,
            fixed_loss=None if fixed is None else lambda: fixed.loss_of_step,
        )
        judge.after_write = partial(writes.collective, "backward")
        sharded = FullyShardedModels(self._models)
        judge.is_reduced = lambda: (
            all(one.require_backward_grad_sync for one in self._reducing()) and sharded.reduces
        )
        if fixed is not None:
            fixed.measure = judge.measure
        return judge

    def _reducing(self) -> list[DistributedDataParallel]:
        """The DDP models, ours or those of a script."""
        given = members(self._objects.get("model"))
        return self._ddps or [one for one in given if isinstance(one, DistributedDataParallel)]

    def _has_local_gradients(self) -> bool:
        """Whether optimizers write by gradients that neither DDP nor fixed micro-batches make equal
        on all ranks."""
        if self._fixed is not None or self._sharding is not None:
            return False
        reduced = {
            id(one)
            for model in self._reducing()
            for one in torch_private.parameters_of_ddp(model)[0]
        }
        every = (one for optimizer in self._optimizers for one in parameters_of(optimizer))
        return any(one.requires_grad and id(one) not in reduced for one in every)

    def digest(self) -> str:
        """Return the SHA-256 of the model, as it is in a checkpoint: what two runs can be compared
        by.

        Of a sharded model: the SHA-256 of those of the parts of all workers in the default group,
        which in `torchelastic.train` is the replica. Then it is a collective.
        """
        self._shards.reshard()
        own = sha256_of(self._model_tree())
        if not self._sharded:
            return own
        if mesh.current() is not None and not session.is_entered():
            raise RuntimeError(
                "digest() of a sharded model asks the other workers of the replica: call it in "
                "train_step."
            )
        return hashlib.sha256("".join(agreement.gather(own)).encode()).hexdigest()

    @property
    def _is_hashed(self) -> bool:
        """Whether the hash of the weights is reported, of each checkpoint and at the end."""
        return self._fixed is not None and not self._sharded

    def _ended(self) -> None:
        """The training is done; called on one rank."""
        if self._is_hashed and milestones.is_heard() and leaving() is None:
            milestones.weights_hashed(self.step, self.digest(), final=True)

    # --- a step ----------------------------------------------------------------------------------

    def snapshot(self) -> UndoRecord:
        """Return an undo record of the step that begins. Only the latest can be applied."""
        if self._sharding is not None:
            self._sharding.begin()
        record = self._undo.begin(self._version)
        if self._judge is not None:
            self._judge.begin()
        if self._fixed is not None:
            self._fixed.begin()
        return record

    def apply(self, snapshot: UndoRecord) -> None:
        """Undo the step. Raises Torn if it failed in or after a write without a copy."""
        self._interrupted = True
        self.step = snapshot.version[1]
        if self._sharding is not None:
            self._sharding.interrupted()
        self._undo.undo(snapshot)

    def _judged(self) -> tuple[Action, str] | None:
        return self._judge_step(self.step + 1, session.current().rank)

    def _judge_step(self, step: int, rank: int) -> tuple[Action, str] | None:
        judge, guard = self._judge, self._guard
        if judge is None or guard is None or (found := judge.end(step)) is None:
            return None
        bad = self._bad_step(found, judge, step, rank)
        action = self._response(guard, bad)
        self._undo_bad(guard, judge, bad, action)
        return action, bad.text

    def _bad_step(self, found: FoundBad, judge: StepJudge, step: int, rank: int) -> BadStep:
        fixed = self._fixed
        micro_batches = () if fixed is None else fixed.bad_micro_batches(judge.is_bad_loss)
        return BadStep(
            step=step,
            rank=rank,
            reason=found.verdict.reason,
            norm=found.norm,
            loss=found.loss,
            deviation=found.verdict.deviation,
            is_origin=found.is_origin or bool(micro_batches),
            micro_batches=micro_batches,
            samples=tuple(
                one for part in parts.progresses(self._stateful) for one in part.in_flight
            ),
        )

    def _response(self, guard: Guard, bad: BadStep) -> Action:
        """Return what is done about a bad step, the same on all ranks."""
        wanted, config = guard.config.on_bad, guard.config
        if callable(wanted):
            # Only this rank's samples are in `bad`, and a function may depend on anything.
            number = guard.number_of(wanted(bad))
            if self._keeper is not None:
                wanted = ACTIONS[agreement.gather(number)[0]]
                _refuse_retry(wanted)
            else:
                wanted = ACTIONS[session.current().group.tell_all([number])[0][0]]
        earlier = guard.history.bad
        if self._judge is not None and self._judge.retried == bad.step:
            earlier = (*earlier, bad.step)
        return response(wanted, earlier, bad.step, config)

    def _was_skipped(self, step: int) -> bool:
        return self._guard is not None and self._guard.history.skipped == step

    def _says_skipped(self, rest: Mapping[str, Any], step: int) -> bool:
        """Return whether the state of another worker says that a step was skipped."""
        names = [name for name, part in self._stateful.items() if part is self._guard]
        return any(rest["objects"][name]["skipped"] == step for name in names)

    def _undo_bad(self, guard: Guard, judge: StepJudge, bad: BadStep, action: Action) -> None:
        try:
            self._undo.undo_bad(moves_on=action == "skip")
        except Torn as error:
            raise NonRetryableException(
                f"{bad.text}, and cannot be undone: {error} Pass copy_before_write=True to "
                "TorchState."
            ) from error
        if self._fixed is not None:
            self._fixed.committed()
        for model in self._changeable:
            ddp.adopt(model, ddp.layout(model))
        judge.retried = bad.step if action == "retry" else -1
        if action == "skip":
            windows = guard.history.windows
            guard.history = GuardHistory(windows, judge.with_bad(bad.step), bad.step)
        judge.begin()
        if not milestones.is_heard():  # else an agent logs it, once for all ranks
            log.warning("%s: %s", bad.text, _DONE[action])
        milestones.step_was_bad(**asdict(bad), action=action)
        for tell in guard.listeners:
            tell(bad)

    def _begins_at(self) -> Version:
        if any(
            isinstance(model, DistributedDataParallel)
            for model in members(self._objects.get("model"))
        ):
            raise TypeError("Pass the plain module as model: TorchState wraps it in DDP itself.")
        replica = mesh.current()
        if replica is not None:
            self._copy_before_write = copies(self._copy_before_write, len(self._optimizers))
            self._sharding = Sharding(
                replica,
                self._models,
                self._optimizers,
                self._snapshots_of_part(),
                averages=self._fixed is None,
            )
            if self._fixed is not None:
                if self._fixed.audits.rate:
                    raise ConfigError(
                        "Guard(audit=...) repeats micro-batches on single workers: leave it out "
                        "with a model over torchelastic.mesh."
                    )
                reduces, reshard = self._sharding.reduces, self._shards.reshard
                self._fixed.sharded = InReplica(replica, reduces, reshard)
            self._ddp = False
        elif self._sharded:
            raise TypeError(
                f"{self._sharded[0]} is sharded over ranks, but not over a mesh that can outlive a "
                "lost worker: make the mesh with torchelastic.mesh."
            )
        return self._version

    def _rehearse(self) -> None:
        if self._sharding is not None:
            rehearse(self._optimizers)

    def _ready_in(self) -> int:
        return -1 if self._sharding is None else self._sharding.ready_in

    def _copies(self) -> bool | None:
        return self._undo.writes.known

    def _complete(self) -> bool:
        if self._sharding is None:
            return False
        here = session.current()
        completed = self._sharding.complete(here, self._rest, self._load_rest, self._says_skipped)
        if completed and self._undo.late is not None and not self._was_skipped(here.version[1]):
            # Before `sync`, in which this worker may send its buffers to one that has none.
            self._undo.buffers.put_heavy(self._undo.late[2])
            rank_private.restore(self._undo.late[1], self._undo.buffers)
        return completed

    def _form(self) -> list[tuple[str, str]]:
        reduced = () if self._ddp is False else ddp.form_of(self._wrapped or self._models)
        return [*self._form_of_parts(), *reduced]

    def _form_of_parts(self) -> list[tuple[str, str]]:
        return [
            *module_state.form_of_modules(self._models),
            *module_state.form_of_optimizers(self._optimizers),
            *((f"the part '{name}'", "an object") for name in self._stateful),
            *((f"the part '{name}'", "a value") for name in self._values),
            *(() if self._fixed is None else self._fixed.form()),
            *(() if self._guard is None else self._guard.config.form()),
        ]

    def _committed(self, version: Version) -> None:
        # Faster than `self.step = ...`, for which `__setattr__` checks whether it is a part.
        for tell in self._listeners:
            tell()
        own = self.__dict__
        own["_version"], own["step"] = version, version[1]
        if self._recorded:
            self._record(version)
        self._undo.committed()
        if self._fixed is not None:
            self._fixed.committed()
        if self._sharding is not None:
            self._sharding.snapshots.committed(version)
        if self._changeable:
            own["_changeable"] = [one for one in self._changeable if not ddp.committed(one)]

    def _record(self, version: Version) -> None:
        """Record the samples of the step in the ledger."""
        assert self._ledger is not None
        if self._sharding is not None and not self._sharding.replica.is_recorder:
            return
        for part in self._recorded:
            self._ledger.record(*version, part.latest, skipped=self._was_skipped(version[1]))

    # --- a world ---------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring all ranks of this world to the freshest version.

        Collectives come first, local changes last: a rank that loses its peers meanwhile has
        either its old state or all of the new one.
        """
        checkpoint.before_write()
        world = session.current()
        base = world.freshest
        if base == TORN:
            raise Torn("No worker of this world has a complete state; a checkpoint is needed.")
        self._undo.outside()
        peers = world if self._sharding is None else self._sharding.peers(world)
        holders = holders_of(peers.versions, base)
        self._join(source=holders[0])
        tree = self._receive(peers, holders, base)
        world.received = peers.received
        if tree is not None:
            self._load(tree)
        kept = self._private_at(base, world)
        if kept is not None:
            rank_private.restore(kept, self._undo.buffers)
        self._undo.enter(
            world.generation, Publisher(world.status_page) if world.status_page else None
        )
        if world.copying is not None:
            self._undo.writes.learned(copying=world.copying)
        world.group.before_collective = self._undo.before_collective
        self._undo.writes.check_collectives = world.group.check_collectives
        if self._sharding is not None:
            self._sharding.enter(world, self._undo.writes)
            self._undo.is_joint = True
            self._sharding.judge = self._judge
        if self._fixed is not None:
            checks = self._checks()
            self._fixed.traces = None if checks is None else checks.traces
            self._fixed.enter(world.group)
        if self._judge is not None:
            self._judge.is_local = world.size > 1 and self._has_local_gradients()
            self._judge.is_sharded = bool(self._sharded)
            self._judge.is_joint = self._sharding is not None
            self._judge.retried = -1
        self._version, self.step = world.version_after_sync, base[1]
        self._newborn = self._interrupted = False

    def _join(self, *, source: int) -> None:
        """Move the models to this world's group."""
        if self._ddp is False:
            return
        if self._wrapped:
            for model in self._ddps:
                ddp.swap(model, interrupted=self._interrupted)
        else:
            self._wrap()
        for model in self._ddps:
            ddp.agree(model, source)
        self._changeable = list(self._ddps)

    def _wrap(self) -> None:
        options = dict(self._ddp) if isinstance(self._ddp, Mapping) else {}
        self._wrapped.extend(
            ddp.wrap(model, **options) if is_trained(model) else model for model in self._models
        )
        self._ddps = [m for m in self._wrapped if isinstance(m, DistributedDataParallel)]
        vars(self)["model"] = like(self.module, self._wrapped)

    def _receive(self, peers: Session | Peers, holders: Sequence[int], base: Version) -> Any:
        """Return the state on ranks that lack it, None on ranks that have it."""
        if len(holders) == peers.size:
            return None
        share = partial(transfer.share, peers, holders=holders, link=peers.link)
        if peers.rank in holders:
            return share(self._tree())
        own, world = peers.versions[peers.rank], session.current()
        parts = 1 if self._sharding is None else self._sharding.replica.size
        is_whole = not missing_parts(world.versions, own, parts)
        if not is_worthless(own, base, is_whole=is_whole):
            return share(None)
        self._undo.overwritten()
        return share(None, into=self._tree())

    def _private_at(self, base: Version, world: Session) -> Private | None:
        """Return this rank's private state at `base`: loaded with it, remembered, or left by its
        predecessor. With fixed micro-batches nothing is private: random numbers depend on the
        step, and buffers are the same on all ranks."""
        if self._fixed is not None:
            return None
        kept, self._kept_private = self._kept_private, None
        if kept is not None:
            return kept
        # A skipped step ends with the private state of its beginning.
        was_skipped = self._was_skipped(base[1])
        late = self._undo.late
        if late is not None and late[0][1] == base[1]:
            if was_skipped:
                return self._undo.at_beginning()
            self._undo.buffers.put_heavy(late[2])
            return late[1]
        if self._newborn and world.status_page is not None:
            return rank_private.left_behind(world.status_page, base, was_skipped=was_skipped)
        return None

    # --- the shared state ------------------------------------------------------------------------

    def _tree(self) -> dict[str, Any]:
        tree = self._solid() | {"gradients": self._undo.gradients.tree()}
        return tree if self._sharding is None else to_shards(tree)

    def _solid(self) -> dict[str, Any]:
        """Return the state that exists between any two steps."""
        return {
            "model": [module_state.module_tree(model) for model in self._models],
            "optimizer": [module_state.optimizer_tree(optimizer) for optimizer in self._optimizers],
            **self._rest(),
        }

    def _rest(self) -> dict[str, Any]:
        return {
            "objects": {name: part.state_dict() for name, part in self._stateful.items()},
            "values": {name: getattr(self, name) for name in self._values},
            "ddp": [ddp.packed(one) for one in self._followed],
        }

    def _load(self, tree: Mapping[str, Any]) -> None:
        self._undo.overwritten()
        if self._fixed is not None:
            self._fixed.forget()
        if self._sharding is not None:
            parameters = self._undo.gradients.parameters
            tree = from_shards(tree, self._models, self._optimizers, parameters)
        for model, saved in zip(self._models, tree["model"], strict=True):
            module_state.load_module(model, saved)
        for optimizer, saved in zip(self._optimizers, tree["optimizer"], strict=True):
            module_state.load_optimizer(optimizer, saved)
        self._undo.gradients.load(tree["gradients"])
        self._load_rest(tree)
        self._undo.buffers.find()

    def _load_rest(self, tree: Mapping[str, Any]) -> None:
        for name, part in self._stateful.items():
            part.load_state_dict(tree["objects"][name])
        for name in self._values:
            Value(self, name).restore(tree["values"][name])
        for model, said in zip(self._followed, tree.get("ddp", ()), strict=False):
            ddp.adopt(model, ddp.unpacked(said))

    # --- the comparison of states ----------------------------------------------------------------

    def _checks_of(self, guard: Guard | None) -> StateChecks | None:
        if guard is None or guard.config.check_every is None:
            return None
        checks = StateChecks(guard.config.check_every, self._capture, self._load_copy)
        guard.listeners.append(lambda _: checks.at_once())  # a flipped bit may make steps bad
        return checks

    def _checks(self) -> StateChecks | None:
        return None if self._sharding is not None else self._state_checks

    def _capture(self) -> tuple[Any, Private]:
        return self._tree(), self._undo.private()

    def _load_copy(self, version: Version, tree: Any, private: Private) -> None:
        """Load a copy of an earlier state; `sync` follows."""
        checkpoint.before_write()
        self._load(tree)
        self._kept_private = private
        self._version, self.step = version, version[1]

    # --- a single replica ------------------------------------------------------------------------

    def _part_snapshots(self) -> PartSnapshots | None:
        return None if self._sharding is None else self._sharding.snapshots

    def _snapshots_of_part(self) -> PartSnapshots:
        tree = PartTree(
            self._models,
            self._optimizers,
            self._rest_of_part,
            lambda _: None,
            self._form_of_parts(),
            load=self._load_part,
        )
        flush = self._ledger.flush if self._ledger is not None else None
        return PartSnapshots(tree, self._shards.reshard, self._before_load, flush)

    def _before_load(self) -> None:
        checkpoint.before_write()
        self._shards.reshard()
        self._undo.overwritten()

    def _rest_of_part(self) -> dict[str, Any]:
        """Return what a snapshot of this worker's part holds besides models and optimizers."""
        private = bytearray(rank_private.pack(self._undo.private()))
        return {
            **self._rest(),
            "gradients": to_shards(self._undo.gradients.tree()),
            "private": torch.frombuffer(private, dtype=torch.uint8),
        }

    def _load_part(self, tree: Mapping[str, Any]) -> None:
        self._load(tree)
        self._kept_private = rank_private.unpack(bytes_of(tree["private"]))

    # --- run + keep ------------------------------------------------------------------------------

    def restore(self, start: int | None = None) -> int:
        """Resume from the freshest state. Call in a script, before its loop, on all ranks.

        Takes the snapshot in this node's memory, else another node's, else the latest checkpoint;
        or keeps the state that the script loaded itself (`start` steps done) if nothing is newer.
        Returns the number of steps done, the same on all ranks: 0 if there is no saved state, and
        then nothing changes.
        """
        if session.is_entered():
            raise RuntimeError(
                "Do not call this under torchelastic.train, which restores and commits itself."
            )
        if self._keeper is None:
            if self._guard is not None:
                _refuse_retry(self._guard.config.on_bad)
            start = start if start is not None else self.step or None
            tree = Tree(
                self._models, self._optimizers, self._rest, self._load_rest, self._form_of_parts()
            )
            agent = agent_client.connect()
            parameters = [model.parameters() for model in self._models]
            self._keeper = Keeper(
                self,
                tree,
                Buffers(self._models),
                self._optimizers,
                agent,
                shards=self._shards,
                stored=self._stored_of,
                before_seal=self._ledger.flush if self._ledger is not None else None,
                waits=BackwardWaits(parameters) if agent is not None else None,
                steps_taken=partial(steps_taken, self._optimizers, self._stateful.values()),
            )
            if self._keeper.rank == 0:
                checkpoint.warn_if_never_due()
                ended = weakref.WeakMethod(self._ended)
                milestones.at_end(lambda: (call := ended()) and call())
            self._followed = ddp.follow_all(members(self._objects.get("model")))
        step = self._keeper.restore(start)
        for model in self._followed:
            ddp.agree(model, source=0)
        self._changeable = list(self._followed)
        if step is not None:
            self._version, self.step = (FIRST[0], step), step
        if self._fixed is not None:
            if step is None:
                self._fixed.same_beginning(self._models)
            self._fixed.begin()
        if self._judge is not None:
            self._judge.is_local = self._keeper.size > 1 and self._has_local_gradients()
            self._judge.is_sharded = bool(self._sharded)
            self._begin_judged(self._judge)
        return self.step

    def _begin_judged(self, judge: StepJudge) -> None:
        """Begin a step of a script that may have to be undone."""
        self._undo.begin((self._version[0], self.step))
        judge.begin()

    def commit(self, step: int | None = None) -> None:
        """Commit a step and keep the state in memory. Call in a script, after each step.

        Parameters and optimizer state are copied during the next forward and backward, and
        `optimizer.step` waits for the copy. `step` is the number of steps done; by default one
        more than before.
        """
        if self._keeper is None:
            raise RuntimeError("Call restore() before the first commit(), on all ranks.")
        with self._keeper.committing():
            self._commit(self._keeper, self.step + 1 if step is None else step)

    def _commit(self, keeper: Keeper, done: int) -> None:
        judged = self._judge_step(done, keeper.rank)
        if judged is not None and judged[0] == "stop":
            keeper.save_at_end(self.step)
            raise NonRetryableException(why_it_ends(judged[1], self.step))
        checks = None if self._sharded or keeper.size == 1 else self._state_checks
        # First: it also knows which rank is wrong.
        if checks is not None and (checks.is_due((0, done)) or keeper.is_comparing):
            checks.compare(self._solid(), done, keeper.rank)
        keeper.check(done)  # before anything has changed
        for tell in self._listeners:
            tell()
        self.step = done
        if self._recorded:
            self._record((keeper.generation, done))
        if self._changeable:
            self._changeable = [one for one in self._changeable if not ddp.committed(one)]
        keeper.commit(done)
        if self._fixed is not None:
            self._fixed.committed()
            self._fixed.begin()
        if self._judge is not None:
            self._undo.committed()
            self._begin_judged(self._judge)

    # --- checkpoints -----------------------------------------------------------------------------

    def save(self, stream: IO[bytes]) -> None:
        """Write a checkpoint; `torch.load(...)["model"]` is the model's state_dict."""
        if self._sharded:
            raise TypeError(
                f"{self._sharded[0]} is sharded over ranks, so one rank cannot save it: use a "
                "CheckpointStore as the checkpoint manager."
            )
        torch.save(self._stored(), stream)

    def load(self, stream: IO[bytes]) -> None:
        """Read a checkpoint, without running any code from it."""
        self._load_stored(torch.load(stream, weights_only=True, map_location="cpu"))

    def _stored(self) -> dict[str, Any]:
        """Return a checkpoint's content as a tree of tensors and plain values, without copying."""
        optimizers = [module_state.optimizer_tree(optimizer) for optimizer in self._optimizers]
        return stored(self.step, self._model_tree(), optimizers, self._rest())

    def _stored_of(
        self, lasting: Mapping[str, Any], passing: Mapping[str, Any], step: int
    ) -> dict[str, Any]:
        """Return a checkpoint's content from both halves of a snapshot."""
        named = zip(self._models, lasting["parameters"], passing["buffers"], strict=True)
        models = [
            module_state.state_dict_of(model, {**some, **more}) for model, some, more in named
        ]
        states = zip(lasting["state"], passing["groups"], strict=True)
        optimizers = [{"state": state, "groups": groups} for state, groups in states]
        return stored(step, like(self.module, models), optimizers, passing["rest"])

    def _model_tree(self) -> Any:
        return like(self.module, [model.state_dict() for model in self._models])

    def _lasting(self) -> list[torch.Tensor]:
        """Return the tensors that only optimizers write; these now wait for checkpoints."""
        if not self._is_guarded:
            for optimizer in self._optimizers:
                optimizer.register_step_pre_hook(_before_write)
            self._is_guarded = True
        return written_by(self._models, self._optimizers)

    @cached_property
    def _shards(self) -> Shards:
        return Shards(self._models, self._optimizers)

    def _shards_of(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return, by the given names of a checkpoint's tensors, the DTensors of this world whose
        part each rank reads."""
        if not self._sharded:
            return {}
        from torchelastic.checkpoint.write_plan import flatten  # loads torch's checkpoints

        _, model = flatten({"model": self._model_tree()})
        parameters = {name: one for name, one in model.items() if is_sharded(one)}
        beginning = f"{OPTIMIZER}."
        shapes = {
            name.removeprefix(beginning): shape_of(one.size, one.properties.dtype)
            for name, one in stored.items()
            if name.startswith(beginning)
        }
        made = self._shards.made(shapes)
        return parameters | {f"{beginning}{name}": one for name, one in made.items()}

    def _load_stored(self, saved: Any) -> None:
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise ValueError("This checkpoint was not written by a TorchState.")
        checkpoint.before_write()
        rest = tensor_tree.restore(saved["skeleton"], saved["tensors"])
        put_in(state_of(rest["optimizer"]), saved[OPTIMIZER])
        if "_undo" in vars(self):
            self._undo.overwritten()
            self._undo.gradients.load([False] * len(self._undo.gradients.parameters))
        for model, state in zip(self._models, cut_like(self.module, saved["model"]), strict=True):
            model.load_state_dict(state)
        for optimizer, state in zip(self._optimizers, rest["optimizer"], strict=True):
            module_state.load_optimizer(optimizer, state)
        self._load_rest(rest)
        self._version, self.step = (FIRST[0], saved["step"]), saved["step"]


def _refuse_retry(on_bad: object) -> None:
    if on_bad == "retry":
        raise ConfigError(
            "on_bad='retry' needs torchelastic.train: a script takes its steps itself. Use 'skip' "
            "or 'stop'."
        )


def _before_write(*_: object) -> None:
    checkpoint.before_write()
