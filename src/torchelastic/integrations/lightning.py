"""Run + keep for Lightning.

    trainer = Trainer(..., callbacks=[torchelastic.integrations.lightning.Keep()])

Keep commits a step at the end of its last batch; the last step of an epoch at the end of the epoch,
so that an interrupted validation runs again. It saves what Lightning has in its checkpoints (model,
optimizers, schedulers, scaler, the progress of its loops and the state of callbacks) and random
states. After a restart Lightning continues to count by itself, but reads the data of an epoch from
the beginning: Keep skips the batches that are done.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchelastic.integrations import frameworks
from torchelastic.integrations.position import Skip, batches_done
from torchelastic.tensors import foreign_shards, rng, tensor_tree
from torchelastic.training.torch_state import TorchState

log = logging.getLogger(__name__)

_pytorch = frameworks.find("lightning.pytorch", "pytorch_lightning")
_Callback: Any = _pytorch.Callback
_strategies = _pytorch.strategies
#: Strategies with the whole model on every rank, or with FSDP2 and tensor parallelism.
_SUPPORTED = (
    _strategies.DDPStrategy,
    _strategies.SingleDeviceStrategy,
    _strategies.ModelParallelStrategy,
)
#: Those that shard it in plain tensors.
_FOREIGN = {_strategies.FSDPStrategy: "FSDP1", _strategies.DeepSpeedStrategy: "DeepSpeed"}

#: Lightning's key for the batch count of an epoch.
_BATCHES = "epoch_loop.batch_progress"


class Keep(_Callback):  # type: ignore[misc]
    """Restores when a fit starts, and commits every step of it. For one `fit` of a script."""

    def __init__(self) -> None:
        self._state: TorchState | None = None
        self._progress: _Progress | None = None
        #: The restored random states, until the data is at its position.
        self._random: rng.Random | None = None
        self._done = 0
        #: The random state at the start of this epoch is already known.
        self._begun = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore: everything is set up now, and Lightning's own checkpoint is not loaded yet."""
        if self._state is not None:
            raise RuntimeError(
                "A Keep works for one fit only: create another Keep for another fit."
            )
        _refuse_other_strategies(trainer.strategy)
        self._progress = _Progress(trainer)
        self._state = TorchState(
            model=pl_module,
            optimizer=list(trainer.optimizers),
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            lightning=self._progress,
        )
        if self._state.restore():
            self._random = rng.capture()
            # The checkpoint passed to `fit` is older: it must not replace this.
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
        """Commit, unless no optimizer stepped: accumulated gradients would be lost."""
        if step > self._done and self._state is not None:
            self._done = step
            self._state.commit(step)


def _refuse_other_strategies(strategy: Any) -> None:
    name = type(strategy).__name__
    for foreign, kind in _FOREIGN.items():
        if isinstance(strategy, foreign):
            raise foreign_shards.refusal(f"a model of {name}", kind)
    if not isinstance(strategy, _SUPPORTED):
        raise TypeError(
            f"Keep does not support {name}: use the strategy 'ddp' or ModelParallelStrategy "
            "(FSDP2), or remove Keep."
        )


def _data_ranks(trainer: Any) -> int:
    """Return the number of ranks with different data: those of tensor parallelism share theirs."""
    shares = trainer.distributed_sampler_kwargs
    return int(shares["num_replicas"] if shares else trainer.world_size)


class _Progress:
    """A part of the state: Lightning's position, and the state of callbacks and plugins."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: Torch's random state when the data of this epoch was shuffled.
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
            "size": _data_ranks(self._trainer),
            "epoch_random": self._epoch_random,
            "others": {name: other.state_dict() for name, other in self._others()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        accumulated = trainer.accumulate_grad_batches
        size = _data_ranks(trainer)
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
        """Yield it if its state can be kept; otherwise warn, but continue training."""
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
        """Go to the first batch that is not done; return True if it is in the middle of an epoch.

        The epoch is shuffled again with its original random state; training then continues with
        the committed one.
        """
        loop = self._trainer.fit_loop
        middle = bool(loop.restarted_mid_epoch)
        done = loop.epoch_loop.batch_progress.current.processed if middle else 0
        for one in loop._combined_loader.flattened:
            _set_epoch(one, loop.epoch_progress.current.processed)
        if middle:
            # Lightning's warning does not apply here: Keep skips the batches that are done.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            torch.set_rng_state(self._epoch_random)
        else:
            rng.restore(random)
            self.epoch_begins()
        self._begin_data(done, lambda: rng.restore(random))
        return middle

    def _begin_data(self, done: int, then: Callable[[], object]) -> None:
        """Restart the iteration after the batches done; calls `then` after skipping them."""
        loop = self._trainer.fit_loop
        loader, fetcher = loop._combined_loader, loop._data_fetcher
        loader.reset()
        skips = done > 0 and all(map(_is_indexed, loader.flattened))
        if skips:
            for one in loader.flattened:
                # DataLoader refuses the plain assignment.
                vars(one)["batch_sampler"] = Skip(one.batch_sampler, done, then)
        iter(fetcher)
        if done and not skips:
            for _ in range(done):
                next(fetcher)
            fetcher.fetched -= done  # Lightning adds them when the epoch continues
            then()


def resized(
    loops: Mapping[str, Any], before: int, now: int, accumulated: int = 1
) -> Mapping[str, Any]:
    """Convert the progress of loops to another world size, which has other batches."""
    progress = loops[_BATCHES]
    if before == now or progress["is_last_batch"]:
        return loops
    done = batches_done(
        progress["current"]["processed"], before=before, now=now, multiple=accumulated
    )
    counts = dict.fromkeys(progress["current"], done)
    # As if the batch had ended completely, which Lightning counts when it continues.
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
    """Return True if batches can be skipped without being read."""
    return (
        isinstance(loader, torch.utils.data.DataLoader)
        and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
        and loader.batch_sampler is not None
        and not tensor_tree.is_stateful(loader)
    )
