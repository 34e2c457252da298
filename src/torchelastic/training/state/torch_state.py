"""`TorchState`: a ready-made State from a model, optimizers and other parts of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchelastic import checkpoint
from torchelastic.data.ledger import Ledger
from torchelastic.snapshot import agent_client
from torchelastic.snapshot.dtensors import is_plain, is_sharded, put_in, shape_of, take_out
from torchelastic.snapshot.keeper import Keeper
from torchelastic.snapshot.leave import Departure
from torchelastic.snapshot.own_checkpoints import steps_taken
from torchelastic.snapshot.shards import Shards
from torchelastic.snapshot.state_tree import Tree
from torchelastic.tensors import module_state, rank_private, tensor_tree, transfer
from torchelastic.tensors.buffers import Buffers
from torchelastic.tensors.checkpoint_tree import flatten
from torchelastic.tensors.rank_private import Private, Publisher
from torchelastic.tensors.small_state import Hyperparameters, Saver, Value, saver_of
from torchelastic.training import session
from torchelastic.training.group import ddp
from torchelastic.training.session import Session
from torchelastic.training.state import commit_listeners
from torchelastic.training.state.state import FIRST, TORN, State, Torn, Version
from torchelastic.training.undo.undo import Undo, UndoRecord
from torchelastic.worker.backward_waits import BackwardWaits

#: The format name in a checkpoint of this class.
_FORMAT = "torchelastic.TorchState 2"
#: The prefix of optimizer tensors in it: `optimizer.state/0/3/exp_avg`.
_OPTIMIZER = "optimizer"
#: Parts that may be several: a list, a tuple or a dict of them.
_SEVERAL = ("model", "optimizer", "scheduler", "sampler", "scaler")


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
        **more: Any,
    ) -> None:
        given = dict(zip(_SEVERAL, (model, optimizer, scheduler, sampler, scaler), strict=True))
        _refuse_names(more, type(self))
        values, objects = _sort(more)
        vars(self).update(given | more)
        self.step, self.epoch = step, epoch
        self._models, self._optimizers = _modules(model), _optimizers(optimizer)
        self._stateful = _stateful(given | objects)
        self._ddp = ddp
        self._wrapped: list[nn.Module] = []
        self._ddps: list[DistributedDataParallel] = []
        #: The DDP models whose layout a committed step of this world may still settle.
        self._unsettled: list[DistributedDataParallel] = []
        self._version: Version = (FIRST[0], step)
        #: Whether no world was entered yet, and whether a step was undone since the last sync.
        self._newborn, self._interrupted = True, False
        self._values = ("epoch", *values)
        self._objects = {name: part for name, part in given.items() if part is not None} | objects
        self._copy_before_write = copy_before_write
        self._keeper: Keeper | None = None
        #: How this worker leaves, in a script with an agent.
        self._departure: Departure | None = None
        #: Parts to notify of every committed step.
        self._listeners = commit_listeners.listeners(self._stateful)
        #: Whether the optimizers wait until checkpoints have their copy.
        self._is_guarded = False
        self._ledger = ledger
        self._recorded = commit_listeners.recorded(self._stateful, ledger)
        solid = self._solid()
        #: The names of tensors that are sharded over ranks.
        self._sharded = _take_out_shards(solid)
        for name, tree in solid.items():
            tensor_tree.check(name, tree)

    #: The objects, which cannot be replaced, and the names of the values, which can.
    _objects: Mapping[str, Any] = MappingProxyType({})
    _values: tuple[str, ...] = ()

    @property
    def module(self) -> Any:
        """The model without DDP, as it was passed in."""
        return _like(self._objects.get("model"), self._models)

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
        copy = self._copy_before_write
        return Undo(self._models, self._optimizers, self._savers(), copy=copy)

    def _savers(self) -> list[Saver]:
        return [
            *map(Hyperparameters, self._optimizers),
            *(saver_of(part) for part in self._stateful.values()),
            *(Value(self, name) for name in self._values),
        ]

    # --- a step ----------------------------------------------------------------------------------

    def snapshot(self) -> UndoRecord:
        """Return an undo record of the step that begins. Only the latest can be applied."""
        return self._undo.begin(self._version)

    def apply(self, snapshot: UndoRecord) -> None:
        """Undo the step. Raises Torn if it failed in or after a write without a copy."""
        self._interrupted = True
        self.step = snapshot.version[1]
        self._undo.undo(snapshot)

    def _begins_at(self) -> Version:
        if any(
            isinstance(model, DistributedDataParallel)
            for model in members(self._objects.get("model"))
        ):
            raise TypeError("Pass the plain module as model: TorchState wraps it in DDP itself.")
        if self._sharded:
            raise TypeError(
                f"{self._sharded[0]} is sharded over ranks, and torchelastic.train supports only "
                "replicated state: run it as a script with restore() and commit()."
            )
        return self._version

    def _form(self) -> list[tuple[str, str]]:
        return [
            *module_state.form_of_modules(self._models),
            *module_state.form_of_optimizers(self._optimizers),
            *((f"the part '{name}'", "an object") for name in self._stateful),
            *((f"the part '{name}'", "a value") for name in self._values),
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
        if self._unsettled:
            own["_unsettled"] = [one for one in self._unsettled if not ddp.committed(one)]

    def _record(self, version: Version) -> None:
        """Record the samples of the step in the ledger."""
        assert self._ledger is not None
        for part in self._recorded:
            self._ledger.record(*version, part.latest)

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
        holders = holders_of(world.versions)
        self._join(source=holders[0])
        tree = self._receive(world, holders)
        if tree is not None:
            self._load(tree)
        kept = self._private_at(base, world)
        if kept is not None:
            rank_private.restore(kept, self._undo.buffers)
        self._undo.enter(
            world.generation, Publisher(world.status_page) if world.status_page else None
        )
        world.group.before_collective = self._undo.before_collective
        self._undo.writes.settle = world.group.settle
        self._version, self.step = (world.generation, base[1]), base[1]
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
        self._unsettled = list(self._ddps)

    def _wrap(self) -> None:
        options = dict(self._ddp) if isinstance(self._ddp, Mapping) else {}
        self._wrapped.extend(
            ddp.wrap(model, **options) if _is_trained(model) else model for model in self._models
        )
        self._ddps = [m for m in self._wrapped if isinstance(m, DistributedDataParallel)]
        vars(self)["model"] = _like(self.module, self._wrapped)

    def _receive(self, world: Session, holders: Sequence[int]) -> Any:
        """Return the state on ranks that lack it, None on ranks that have it."""
        if len(holders) == world.size:
            return None
        if world.rank in holders:
            return transfer.share(world, self._tree(), holders=holders)
        if not is_worthless(world.versions[world.rank], world.freshest):
            return transfer.share(world, None, holders=holders)
        self._undo.overwritten()
        return transfer.share(world, None, holders=holders, into=self._tree())

    def _private_at(self, base: Version, world: Session) -> Private | None:
        """Return this rank's private state at `base`: remembered, or left by its predecessor."""
        late = self._undo.late
        if late is not None and late[0][1] == base[1]:
            return late[1]
        if self._newborn and world.status_page is not None:
            return rank_private.left_behind(world.status_page, base)
        return None

    # --- the shared state ------------------------------------------------------------------------

    def _tree(self) -> dict[str, Any]:
        return self._solid() | {
            "gradients": self._undo.gradients.tree(),
            "copying": self._undo.writes.known,
        }

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
        }

    def _load(self, tree: Mapping[str, Any]) -> None:
        self._undo.overwritten()
        for model, saved in zip(self._models, tree["model"], strict=True):
            module_state.load_module(model, saved)
        for optimizer, saved in zip(self._optimizers, tree["optimizer"], strict=True):
            module_state.load_optimizer(optimizer, saved)
        self._undo.gradients.load(tree["gradients"])
        if tree["copying"] is not None:
            self._undo.writes.learned(copying=tree["copying"])
        self._load_rest(tree)
        self._undo.buffers.find()

    def _load_rest(self, tree: Mapping[str, Any]) -> None:
        for name, part in self._stateful.items():
            part.load_state_dict(tree["objects"][name])
        for name in self._values:
            Value(self, name).restore(tree["values"][name])

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
            start = start if start is not None else self.step or None
            tree = Tree(self._models, self._optimizers, self._rest, self._load_rest, self._form())
            agent = agent_client.connect()
            parameters = [model.parameters() for model in self._models]
            self._keeper = Keeper(
                self,
                tree,
                Buffers(self._models),
                self._optimizers,
                agent,
                shards=self._shards,
                before_seal=self._ledger.flush if self._ledger is not None else None,
                waits=BackwardWaits(parameters) if agent is not None else None,
                steps_taken=partial(steps_taken, self._optimizers, self._stateful.values()),
            )
            if agent is not None:
                self._departure = Departure(agent, tree, self._stored_of, self._keeper)
            if self._keeper.rank == 0:
                checkpoint.warn_if_never_due()
        step = self._keeper.restore(start)
        if self._departure is not None:
            self._departure.prepare()
        if step is not None:
            self._version, self.step = (FIRST[0], step), step
        return self.step

    def commit(self, step: int | None = None) -> None:
        """Commit a step and keep the state in memory. Call in a script, after each step.

        Parameters and optimizer state are copied during the next forward and backward, and
        `optimizer.step` waits for the copy. `step` is the number of steps done; by default one
        more than before.
        """
        if self._keeper is None:
            raise RuntimeError("Call restore() before the first commit(), on all ranks.")
        with self._departure.commit if self._departure is not None else nullcontext():
            self._commit(self._keeper, self.step + 1 if step is None else step)

    def _commit(self, keeper: Keeper, done: int) -> None:
        keeper.check(done)  # before anything has changed
        for tell in self._listeners:
            tell()
        self.step = done
        if self._recorded:
            self._record((keeper.generation, done))
        keeper.commit(done)

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
        return _stored(self.step, self._model_tree(), optimizers, self._rest())

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
        return _stored(step, _like(self.module, models), optimizers, passing["rest"])

    def _model_tree(self) -> Any:
        return _like(self.module, [model.state_dict() for model in self._models])

    def _lasting(self) -> list[torch.Tensor]:
        """Return the tensors that only optimizers write; these now wait for checkpoints."""
        if not self._is_guarded:
            for optimizer in self._optimizers:
                optimizer.register_step_pre_hook(_before_write)
            self._is_guarded = True
        written: list[torch.Tensor] = [p for model in self._models for p in model.parameters()]
        for optimizer in self._optimizers:
            for entries in optimizer.state.values():
                written += [one for one in entries.values() if isinstance(one, torch.Tensor)]
        return written

    @cached_property
    def _shards(self) -> Shards:
        return Shards(self._models, self._optimizers)

    def _shards_of(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return, by the given names of a checkpoint's tensors, the DTensors of this world whose
        part each rank reads."""
        if not self._sharded:
            return {}
        _, model = flatten({"model": self._model_tree()})
        parameters = {name: one for name, one in model.items() if is_sharded(one)}
        beginning = f"{_OPTIMIZER}."
        shapes = {
            name.removeprefix(beginning): shape_of(one.size, one.properties.dtype)
            for name, one in stored.items()
            if name.startswith(beginning)
        }
        made = self._shards.made(shapes)
        return parameters | {f"{beginning}{name}": one for name, one in made.items()}

    def _load_stored(self, saved: Any) -> None:
        if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
            raise ValueError("This checkpoint was not written by a TorchState.")
        checkpoint.before_write()
        rest = tensor_tree.restore(saved["skeleton"], saved["tensors"])
        put_in(_state_of(rest["optimizer"]), saved[_OPTIMIZER])
        if "_undo" in vars(self):
            self._undo.overwritten()
        for model, state in zip(self._models, _cut_like(self.module, saved["model"]), strict=True):
            model.load_state_dict(state)
        for optimizer, state in zip(self._optimizers, rest["optimizer"], strict=True):
            module_state.load_optimizer(optimizer, state)
        self._load_rest(rest)
        self._version, self.step = (FIRST[0], saved["step"]), saved["step"]


def _stored(
    step: int, model: Any, optimizers: Sequence[Mapping[str, Any]], rest: Mapping[str, Any]
) -> dict[str, Any]:
    # By name, so that they are found whether or not they are sharded at the time.
    named = take_out(_state_of(optimizers), is_plain)
    skeleton, tensors = tensor_tree.flatten({**rest, "optimizer": optimizers})
    saved = {"format": _FORMAT, "step": step, "model": model}
    return saved | {_OPTIMIZER: named, "skeleton": skeleton, "tensors": tensors}


def _before_write(*_: object) -> None:
    checkpoint.before_write()


def _state_of(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of optimizers in the form for `take_out` and `put_in`."""
    return {"parameters": [], "state": [optimizer["state"] for optimizer in optimizers]}


def holders_of(versions: Sequence[Version]) -> tuple[int, ...]:
    """Return the ranks whose state all others receive.

    Before any step is committed, each rank has built its state alone, and these may differ: then
    the first such rank's is taken.
    """
    best = max(versions)
    ranks = tuple(rank for rank, version in enumerate(versions) if version == best)
    return ranks[:1] if best[0] < 0 else ranks


def is_worthless(own: Version, base: Version) -> bool:
    """Return whether a state may be overwritten before its replacement has fully arrived.

    The state of a worker that rolled back is the second best, should the best be lost during the
    transfer. So is a first state while no rank has a better one.
    """
    return own < base and own[0] < 0 <= base[0]


# --- parts ----------------------------------------------------------------------------------------


def members(part: Any) -> list[Any]:
    """Return the objects of a part that is one, several or none."""
    if part is None:
        return []
    if type(part) is dict:
        return list(part.values())
    return list(part) if type(part) in (list, tuple) else [part]


def _like(part: Any, items: Sequence[Any]) -> Any:
    """Return the items in the shape of the part."""
    if part is None:
        return None
    if type(part) is dict:
        return dict(zip(part, items, strict=True))
    return type(part)(items) if type(part) in (list, tuple) else items[0]


def _cut_like(part: Any, items: Any) -> list[Any]:
    """Reverse `_like`: return the items of a part; each may be a dict itself."""
    return members(items) if type(part) in (dict, list, tuple) or part is None else [items]


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _modules(part: Any) -> list[nn.Module]:
    """Return the models, without DDP."""
    for model in members(part):
        _expect("model", model, nn.Module)
    return [
        model.module if isinstance(model, DistributedDataParallel) else model
        for model in members(part)
    ]


def _take_out_shards(solid: Mapping[str, Any]) -> list[str]:
    """Remove the sharded tensors from a fresh tree; return their names."""
    lasting = {
        "parameters": [model["parameters"] for model in solid["model"]],
        "state": [optimizer["state"] for optimizer in solid["optimizer"]],
    }
    return list(take_out(lasting))


def _optimizers(part: Any) -> list[Optimizer]:
    for optimizer in members(part):
        _expect("optimizer", optimizer, Optimizer)
    return members(part)


def _expect(name: str, part: object, kind: type) -> None:
    if not isinstance(part, kind):
        raise TypeError(f"'{name}' must be a {kind.__qualname__}, not a {type(part).__qualname__}.")


def _stateful(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return all objects but models and optimizers, by name."""
    found = {}
    for name, part in objects.items():
        if name in ("model", "optimizer"):
            continue
        for number, one in enumerate(members(part)):
            if not tensor_tree.is_stateful(one):
                raise TypeError(
                    f"'{name}', a {type(one).__qualname__}, has no state_dict and load_state_dict: "
                    "add them, or keep its state in values."
                )
            found[name if one is part else f"{name}.{number}"] = one
    return found


def _sort(more: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Split `more` into the names of values and the objects."""
    objects = {name: part for name, part in more.items() if tensor_tree.is_stateful(part)}
    values = tuple(name for name in more if name not in objects)
    for name in values:
        tensor_tree.check(name, more[name])
    return values, objects


def _refuse_names(more: Mapping[str, Any], kind: type) -> None:
    for name in more:
        if hasattr(kind, name) or name.startswith("_"):
            raise TypeError(
                f"A part cannot be named '{name}': TorchState already has that attribute."
            )
