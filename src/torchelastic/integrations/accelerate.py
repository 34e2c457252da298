"""Run + keep for loops written with Accelerate.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    keep = torchelastic.integrations.accelerate.Keep(accelerator)
    for epoch in keep.epochs(3):
        for batch in keep.batches(loader):
            with accelerator.accumulate(model):
                ...
            keep.commit()

Keep saves what `accelerator.save_state` writes, everything prepared or registered for
checkpointing, and the position of the loop in the epoch. After a restart `epochs` begins with the
interrupted epoch, and `batches` with its first batch that is not done. If all batches are done,
`batches` yields none, and the loop runs its end-of-epoch code again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch

from torchelastic.integrations import frameworks
from torchelastic.integrations.position import batches_done
from torchelastic.tensors import foreign_shards, rng
from torchelastic.training.torch_state import TorchState

_accelerate = frameworks.find("accelerate")

#: Distributed types with the whole model on every rank.
_REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU")
#: Those that shard it in plain tensors, unless it is FSDP2.
_FOREIGN = {"FSDP": "FSDP1", "DEEPSPEED": "DeepSpeed"}


class Keep:
    """Restores when it is created, on all ranks and after `prepare`. One per script.

    `more` are additional parts to keep, as for a TorchState.
    """

    def __init__(self, accelerator: Any, **more: Any) -> None:
        refuse_other_shards(accelerator)
        if not accelerator._models:
            raise RuntimeError("Nothing to keep: create Keep after accelerator.prepare.")
        self._accelerator = accelerator
        self._progress = _Progress(accelerator)
        self._state = TorchState(
            model=[accelerator.unwrap_model(model) for model in accelerator._models],
            optimizer=[prepared.optimizer for prepared in accelerator._optimizers],
            scheduler=[prepared.scheduler for prepared in accelerator._schedulers],
            scaler=accelerator.scaler,
            accelerate=self._progress,
            **{f"registered_{n}": one for n, one in enumerate(accelerator._custom_objects)},
            **more,
        )
        #: The restored random states, until the data is at its position.
        self._random: rng.Random | None = None
        if self._state.restore():
            self._random = rng.capture()

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self._state.step

    @property
    def state(self) -> TorchState:
        """The kept state, for checkpoints and for the values in `more`."""
        return self._state

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are not finished, out of `count`."""
        for epoch in range(self._progress.epoch, count):
            if self._random is None:
                self._progress.epoch, self._progress.done = epoch, 0
            yield epoch

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of this epoch that are not done, from a prepared loader."""
        if getattr(loader, "use_stateful_dataloader", False):
            raise TypeError("Keep skips batches itself: remove use_stateful_dataloader.")
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._progress.epoch)
        yield from self._resumed(loader) if self._random is not None else self._whole(loader)

    def _whole(self, loader: Any) -> Iterator[Any]:
        self._progress.begins(loader)
        for batch in loader:
            self._progress.done += 1
            yield batch

    def _resumed(self, loader: Any) -> Iterator[Any]:
        """Shuffle with the epoch's first random state, continue with the committed one."""
        random, self._random = self._random, None
        assert random is not None
        if not self._progress.done:
            rng.restore(random)
            yield from self._whole(loader)
            return
        self._progress.begins_again(loader)
        rest = iter(_accelerate.skip_first_batches(loader, self._progress.done))
        first = list(islice(rest, 1))
        rng.restore(random)
        for batch in chain(first, rest):
            self._progress.done += 1
            yield batch

    def commit(self) -> None:
        """Commit the step, if this batch was its last one. Call it after each batch."""
        if self._accelerator.sync_gradients:
            self._state.commit()


def refuse_other_shards(accelerator: Any) -> None:
    """Refuse all ways to shard a model but FSDP2."""
    kind = accelerator.distributed_type.value
    if kind in _REPLICATED or accelerator.is_fsdp2:
        return
    if kind in _FOREIGN:
        raise foreign_shards.refusal(f"a model of Accelerate's {kind}", _FOREIGN[kind])
    raise TypeError(
        f"Keep does not support {kind}: use plain data parallelism or FSDP2, or remove Keep."
    )


class _Progress:
    """A part of the state: the epoch, the batches done, and the random state at its start."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.epoch = self.done = 0
        #: Random states of torch, and of the generator that Accelerate synchronises.
        self._random = torch.get_rng_state()
        self._shuffle: torch.Tensor | None = None

    def begins(self, loader: Any) -> None:
        self._random = torch.get_rng_state()
        generator = getattr(loader, "synchronized_generator", None)
        self._shuffle = generator.get_state() if generator is not None else None

    def begins_again(self, loader: Any) -> None:
        torch.set_rng_state(self._random)
        generator = getattr(loader, "synchronized_generator", None)
        if generator is not None and self._shuffle is not None:
            generator.set_state(self._shuffle)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "done": self.done,
            "size": self._accelerator.num_processes,
            "random": self._random,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.done = batches_done(
            state["done"],
            before=state["size"],
            now=self._accelerator.num_processes,
            multiple=self._accelerator.gradient_accumulation_steps,
        )
        self._random, self._shuffle = state["random"], state["shuffle"]
