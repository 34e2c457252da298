"""Run + keep for Lightning.

    trainer = Trainer(..., callbacks=[torchelastic.integrations.lightning.Keep()])

A batch after which the optimizer has stepped is committed at its end; the last one of an epoch at
the end of the epoch, so that a validation that is cut off is run again. What is kept is what
Lightning has in its checkpoints: model, optimizers, schedulers, scaler, the progress of its loops
and the state of callbacks; and random states. After a restart Lightning counts on by itself, but
reads the data of an epoch from the beginning: here the batches that are done are skipped.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchelastic.integrations import frameworks
from torchelastic.integrations.position import Skip, batches_done
from torchelastic.tensors import rng, tensor_tree
from torchelastic.training.state.torch_state import TorchState

log = logging.getLogger(__name__)

_pytorch = frameworks.find("lightning.pytorch", "pytorch_lightning")
_Callback: Any = _pytorch.Callback
#: Strategies with the whole model on every rank.
_REPLICATED = (_pytorch.strategies.DDPStrategy, _pytorch.strategies.SingleDeviceStrategy)

#: Where Lightning keeps the count of batches of an epoch.
_BATCHES = "epoch_loop.batch_progress"


class Keep(_Callback):  # type: ignore[misc]
    """Restores when a fit starts, and commits every step of it. For one `fit` of a script."""

    def __init__(self) -> None:
        self._state: TorchState | None = None
        self._progress: _Progress | None = None
        #: The random states that were restored, until the data has come to its place.
        self._random: rng.Random | None = None
        self._done = 0
        #: The random state at the beginning of this epoch is known already.
        self._begun = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is in its place by now, and Lightning's own checkpoint is not loaded yet."""
        if self._state is not None:
            raise RuntimeError(
                "A Keep works for one fit only: create another Keep for another fit."
            )
        if not isinstance(trainer.strategy, _REPLICATED):
            raise TypeError(
                f"Keep does not support {type(trainer.strategy).__name__} yet, because it shards "
                "the model over the ranks: use the strategy 'ddp', or remove Keep."
            )
        self._progress = _Progress(trainer)
        self._state = TorchState(
            model=pl_module,
            optimizer=list(trainer.optimizers),
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            lightning=self._progress,
        )
        if self._state.restore():
            self._random = rng.capture()
            # The checkpoint that `fit` was given is older: it must not be put over this.
            trainer._checkpoint_connector._loaded_checkpoint = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._done = trainer.global_step
        if self._random is not None and self._progress is not None:
            self._begun = not self._progress.put_data_in_place(self._random)
            self._random = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._begun and self._progress is not None:
            self._progress.epoch_begins()
        self._begun = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_last_batch:
            self._commit(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._commit(trainer.global_step)

    def _commit(self, step: int) -> None:
        """Unless nothing was stepped: gradients were accumulated, and would be lost."""
        if step > self._done and self._state is not None:
            self._done = step
            self._state.commit(step)


class _Progress:
    """A part of the state: where Lightning is, and what others than model and optimizer know."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: Torch's random state when the data of this epoch were shuffled.
        self._epoch_random = torch.get_rng_state()
        self._not_kept: set[str] = set()

    def epoch_begins(self) -> None:
        self._epoch_random = torch.get_rng_state()

    def state_dict(self) -> dict[str, Any]:
        loops = self._trainer.fit_loop.state_dict()
        # The positions of loaders are their rank's alone, and come from the number of batches.
        loops["state_dict"].pop("combined_loader", None)
        return {
            "loops": loops,
            "size": self._trainer.world_size,
            "epoch_random": self._epoch_random,
            "others": {name: other.state_dict() for name, other in self._others()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        accumulated = trainer.accumulate_grad_batches
        size = trainer.world_size
        loop = trainer.fit_loop
        loop.load_state_dict(resized(state["loops"], state["size"], size, accumulated))
        if loop.epoch_progress.current.processed == loop.epoch_progress.current.started:
            # The epoch is over. With max_steps Lightning takes it for unfinished, and counts twice.
            loop._restarting = loop.epoch_loop.restarting = False
        self._epoch_random = state["epoch_random"]
        for name, other in self._others():
            if name in state["others"]:
                other.load_state_dict(state["others"][name])

    def _others(self) -> Iterator[tuple[str, Any]]:
        trainer = self._trainer
        for callback in trainer.callbacks:
            yield from self._if_plain(callback.state_key, callback)
        yield from self._if_plain("precision", trainer.precision_plugin)
        if trainer.datamodule is not None:
            yield from self._if_plain("datamodule", trainer.datamodule)

    def _if_plain(self, name: str, other: Any) -> Iterator[tuple[str, Any]]:
        """A state that cannot be kept is no reason to refuse the training."""
        try:
            tensor_tree.check(name, other)
        except TypeError as error:
            if name not in self._not_kept:
                self._not_kept.add(name)
                log.warning("Keep does not save the state of %s: %s", type(other).__name__, error)
        else:
            yield name, other

    # --- data ------------------------------------------------------------------------------------

    def put_data_in_place(self, random: rng.Random) -> bool:
        """Begin with the first batch that is not done; whether that is in the middle of an epoch.

        The epoch is begun with the random state that it was begun with before, in case its order
        comes from there; the training goes on with the one it was committed with.
        """
        loop = self._trainer.fit_loop
        middle = bool(loop.restarted_mid_epoch)
        done = loop.epoch_loop.batch_progress.current.processed if middle else 0
        for one in loop._combined_loader.flattened:
            _set_epoch(one, loop.epoch_progress.current.processed)
        if middle:
            # Lightning says so when an epoch goes on, and does not know that it is not true here.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            torch.set_rng_state(self._epoch_random)
        else:
            rng.restore(random)
            self.epoch_begins()
        self._begin_data(done, lambda: rng.restore(random))
        return middle

    def _begin_data(self, done: int, then: Callable[[], object]) -> None:
        """Iterate anew, from beyond what is done; `then` is called when it is behind."""
        loop = self._trainer.fit_loop
        loader, fetcher = loop._combined_loader, loop._data_fetcher
        loader.reset()
        skips = done > 0 and all(map(_is_indexed, loader.flattened))
        if skips:
            for one in loader.flattened:
                # DataLoader refuses the assignment, for the sake of those who do not know better.
                vars(one)["batch_sampler"] = Skip(one.batch_sampler, done, then)
        iter(fetcher)
        if done and not skips:
            for _ in range(done):
                next(fetcher)
            fetcher.fetched -= done  # Lightning adds them when the epoch goes on
            then()


def resized(
    loops: Mapping[str, Any], before: int, now: int, accumulated: int = 1
) -> Mapping[str, Any]:
    """The progress of loops in a world of another size, which has other batches in an epoch."""
    progress = loops[_BATCHES]
    if before == now or progress["is_last_batch"]:
        return loops
    done = batches_done(
        progress["current"]["processed"], before=before, now=now, multiple=accumulated
    )
    counts = dict.fromkeys(progress["current"], done)
    # As if the batch had ended altogether, which Lightning would count when it goes on.
    total = dict.fromkeys(progress["total"], progress["total"]["processed"])
    own = loops["epoch_loop.state_dict"]
    stepped = own.get("_batches_that_stepped", 0) + 1
    return {
        **loops,
        _BATCHES: {**progress, "current": counts, "total": total},
        "epoch_loop.state_dict": {**own, "_batches_that_stepped": stepped},
    }


def _set_epoch(loader: Any, epoch: int) -> None:
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _is_indexed(loader: object) -> bool:
    """Whether batches can be skipped without being read."""
    return (
        isinstance(loader, torch.utils.data.DataLoader)
        and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
        and loader.batch_sampler is not None
        and not tensor_tree.is_stateful(loader)
    )
