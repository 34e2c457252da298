"""The elastic loader on top of torchdata's StatefulDataLoader, for programs that expect one."""

from __future__ import annotations

from typing import Any, TypeVar

from torchelastic.data.loader import ElasticLoader

try:
    from torchdata import stateful_dataloader as torchdata  # type: ignore[import, unused-ignore]
except ImportError as error:
    raise ImportError(
        "torchelastic.data.StatefulDataLoader needs torchdata: pip install torchdata. "
        "torchelastic.data.DataLoader does the same without it."
    ) from error

T = TypeVar("T")


class StatefulDataLoader(ElasticLoader[T], torchdata.StatefulDataLoader[T]):  # type: ignore[misc]
    """A `torchdata.stateful_dataloader.StatefulDataLoader`, with the arguments of our DataLoader.

    Its state is that of the sampler or stream: the committed position, the same on all ranks, valid
    for any world size. torchdata's own state is that of one rank and its loading processes, and
    does not fit another number of ranks. So it does not contain the state of the dataset: if the
    dataset has any, keep it as a part of the TorchState.
    """

    def state_dict(self) -> dict[str, Any]:
        return self.progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.progress.load_state_dict(state_dict)

    def committed(self) -> None:
        """Commit the step for the sampler or stream."""
        self.progress.committed()
