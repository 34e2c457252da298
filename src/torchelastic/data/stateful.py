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

    Its state is the sampler's or the stream's: what is committed, the same on all ranks, good for
    any world. torchdata's own is that of one rank and of its loading processes, and no other number
    of ranks could go on from it. So the state of the dataset itself is not in it: keep in the
    TorchState, as parts, what the dataset needs besides a sample's number.
    """

    def state_dict(self) -> dict[str, Any]:
        return self.progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.progress.load_state_dict(state_dict)

    def committed(self) -> None:
        """The step is committed, as its sampler or stream is told otherwise."""
        self.progress.committed()
