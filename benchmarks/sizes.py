"""The sizes of the model that is trained."""

from dataclasses import dataclass

OUTPUTS = 8
#: Workers that hold one copy of a sharded model.
SHARDS = 2


@dataclass(frozen=True)
class Size:
    """A multi-layer perceptron."""

    width: int
    depth: int
    batch: int

    @property
    def parameters(self) -> int:
        return self.depth * self.width * (self.width + 1) + (self.width + 1) * OUTPUTS

    @property
    def state_bytes(self) -> int:
        """What a newcomer lacks: the parameters and as much momentum, in single precision."""
        return 2 * 4 * self.parameters


SIZES = {
    "small": Size(width=128, depth=1, batch=32),
    "10k": Size(width=96, depth=1, batch=8),
    "1m": Size(width=512, depth=4, batch=8),
    "25m": Size(width=2048, depth=6, batch=8),
    # Of state: 84 MB, and 1 GB.
    "10m": Size(width=1024, depth=10, batch=8),
    "126m": Size(width=2048, depth=30, batch=8),
}
