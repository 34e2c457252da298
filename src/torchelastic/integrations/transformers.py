"""Run + keep for the Trainer of Hugging Face.

    torchelastic.integrations.transformers.Keep(trainer)
    trainer.train()

Keep commits a step when the next one begins, after logging, saving and evaluation: if a worker is
killed during these, the step is done again and so are they. After a restart the Trainer resumes by
itself, from a checkpoint that Keep writes. It contains only the TrainerState and this rank's random
states, since model and optimizer come from memory; so the Trainer continues to count, skips the
batches that are done, and then restores the random states.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchelastic.integrations import frameworks
from torchelastic.integrations.accelerate import refuse_other_shards
from torchelastic.training.torch_state import TorchState

log = logging.getLogger(__name__)

_callbacks = frameworks.find("transformers.trainer_callback")
_TrainerCallback: Any = _callbacks.TrainerCallback


class Keep(_TrainerCallback):  # type: ignore[misc]
    """Restores when `trainer.train` is called, and commits every step. For one call of it."""

    def __init__(self, trainer: Any) -> None:
        refuse_other_shards(trainer.accelerator)
        if trainer.args.auto_find_batch_size:
            raise ValueError(
                "Keep does not support auto_find_batch_size, which restarts training with smaller "
                "batches: set the batch size instead."
            )
        self._trainer = trainer
        self._state: TorchState | None = None
        self._progress = _Progress(trainer)
        #: The checkpoint for the Trainer, until it has been read.
        self._stub: tempfile.TemporaryDirectory[str] | None = None
        self._done = 0
        # The Trainer has no hook before it decides where to start.
        self._train, trainer._inner_training_loop = trainer._inner_training_loop, self._resume
        trainer.add_callback(self)

    def _resume(self, *values: Any, **named: Any) -> Any:
        """Restore, then run the Trainer's own loop, which this replaces."""
        if self._state is not None:
            raise RuntimeError(
                "A Keep works for one call of train() only: create another Keep for another call."
            )
        self._stub = tempfile.TemporaryDirectory(prefix="torchelastic-")
        stub = {"resume_from_checkpoint": self._stub.name}
        try:
            if self._trainer.accelerator.is_fsdp2:
                if named.get("resume_from_checkpoint") is not None:
                    raise ValueError("With FSDP2, Keep does not support resume_from_checkpoint.")
                _Sharding(self._trainer, self._restore, self._stub.name).take_over()
                return self._train(*values, **named | stub)
            self._trainer.create_optimizer()
            return self._train(*values, **named | (stub if self._restore() else {}))
        finally:
            self._remove_stub()

    def _restore(self) -> bool:
        """Restore; return whether there was a state. Then the stub has it."""
        assert self._stub is not None
        optimizer = self._trainer.optimizer
        self._state = TorchState(
            model=self._trainer.model,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # without Accelerate's wrapper
            transformers=self._progress,
        )
        if not self._state.restore():
            return False
        self._progress.restored()
        self._progress.write(Path(self._stub.name))
        return True

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._progress.put_in_place()
        self._done = state.global_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._commit(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._remove_stub()
        self._commit(state.global_step)

    def _commit(self, step: int) -> None:
        if step > self._done and self._state is not None:
            self._done = step
            self._state.commit(step)

    def _remove_stub(self) -> None:
        if self._stub is not None:
            self._stub.cleanup()
            self._stub = None


class _Sharding:
    """Shards the model before the Trainer decides where to start, instead of afterwards: only the
    sharded model can be restored."""

    def __init__(self, trainer: Any, restore: Callable[[], bool], stub: str) -> None:
        self._trainer, self._restore, self._stub = trainer, restore, stub
        self._init, self._prepare = trainer._init_training_state, trainer._prepare_for_training
        self._model: Any = None

    def take_over(self) -> None:
        self._trainer._init_training_state = self._begin
        self._trainer._prepare_for_training = self._prepared

    def _begin(self, steps: int, in_epoch: int, epochs: int, _: Any, trial: Any) -> Any:
        begun = self._init(steps, in_epoch, epochs, None, trial)
        self._model, _ = self._prepare(steps, None, None)
        return self._init(steps, in_epoch, epochs, self._stub, trial) if self._restore() else begun

    def _prepared(self, steps: int, loader: Any, _: Any) -> tuple[Any, Any]:
        self._trainer.callback_handler.train_dataloader = loader
        return self._model, loader


class _Progress:
    """A part of the state: the Trainer's position, and objects it creates after the restore."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: Mapping[str, Any] | None = None
        self._hyperparameters: list[dict[str, Any]] = []
        self._not_kept: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        scheduler, scaler = trainer.lr_scheduler, trainer.accelerator.scaler
        return {
            "trainer": self._trainer_state(),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "callbacks": json.dumps(dict(self._callbacks())),
        }

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        """Yield the states of callbacks; warn about those that cannot be kept."""
        for name, one in self._others():
            state = one.state()
            try:
                json.dumps(state)
            except TypeError as error:
                if name not in self._not_kept:
                    self._not_kept.add(name)
                    log.warning("Keep does not save the state of %s: %s.", name, error)
            else:
                yield name, state

    def _trainer_state(self) -> str:
        """Return the TrainerState as JSON, without the log, which would grow with every step."""
        state = self._trainer.state
        names = [field.name for field in dataclasses.fields(state)]
        return json.dumps({name: getattr(state, name) for name in names} | {"log_history": []})

    def _others(self) -> Iterator[tuple[str, Any]]:
        for number, one in enumerate(self._trainer.callback_handler.callbacks):
            if isinstance(one, _callbacks.ExportableState):
                yield f"{number} {type(one).__name__}", one

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = state

    def restored(self) -> None:
        """Save the hyperparameters that creating a scheduler overwrites."""
        self._hyperparameters = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._trainer.optimizer.param_groups
        ]

    def write(self, directory: Path) -> None:
        """Write a checkpoint for the Trainer to resume from."""
        assert self._loaded is not None
        (directory / "trainer_state.json").write_text(self._loaded["trainer"])
        self._trainer._save_rng_state(str(directory))

    def put_in_place(self) -> None:
        """Load the state of objects that did not exist at the restore."""
        if self._loaded is None:
            return
        trainer, loaded = self._trainer, self._loaded
        if loaded["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(loaded["scheduler"])
        if loaded["scaler"] is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(loaded["scaler"])
        for group, known in zip(trainer.optimizer.param_groups, self._hyperparameters, strict=True):
            group.update(known)
        states = json.loads(loaded["callbacks"])
        for name, one in self._others():
            vars(one).update(states.get(name, {}).get("attributes", {}))
        self._loaded = None
