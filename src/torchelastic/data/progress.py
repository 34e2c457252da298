"""The position of a training in its data: samples committed, and samples handed out since.

Both are the same on all ranks, because all take the same steps. *Committed* samples were trained by
all ranks and do not come again. Samples only *handed out* belong to the step in flight: `committed`
makes them count, `load_state_dict` forgets them, and then they come again.

An epoch ends when an iterator finds nothing left, which is not a step: until the next commit the
state says that all of this epoch is consumed, and a rank that continues from it finds nothing left
either. So all ranks see the end of an epoch, also those that have just joined.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchelastic.data.own_rank import OwnRank, own_rank
from torchelastic.errors import ConfigError

#: The most batches that one step is expected to take.
IN_FLIGHT_LIMIT = 1024


class Position(NamedTuple):
    """A position in the data. Only streams use `shard` and `offset`."""

    epoch: int = 0
    #: Samples of this epoch that all ranks have taken.
    consumed: int = 0
    shard: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Handed:
    """The samples that this rank was handed for a step, or for a part of one."""

    epoch: int
    rank: int
    size: int
    #: The positions of all ranks in the order of the epoch: from (inclusive), to (exclusive).
    span: tuple[int, int]
    #: This rank's samples; empty for a placeholder. Of a stream: pairs of shard and number.
    ids: tuple[Any, ...]

    @property
    def total(self) -> int:
        """Samples of all ranks."""
        return self.span[1] - self.span[0]

    @property
    def weight(self) -> float:
        """The factor for this rank's mean loss, so that all samples have equal weight.

        DDP computes the mean over ranks: with unequal shares that is not the mean over samples.
        """
        return self.size * len(self.ids) / self.total


class DataProgress:
    """The base of samplers and streams: a part of a state that is committed by steps."""

    def __init__(self, *, seed: int, shuffle: bool, rank: int | None, size: int | None) -> None:
        self.seed, self.shuffle = seed, shuffle
        self._rank, self._size = rank, size
        if rank is not None or size is not None:
            self.world()  # raises if it is invalid
        self._committed = self._handed = Position()
        #: Each `hand_out` since the last commit; the latest ones if nothing ever commits.
        self._in_flight: deque[Handed] = deque(maxlen=IN_FLIGHT_LIMIT)
        #: The samples of the last commit.
        self.latest: tuple[Handed, ...] = ()
        #: Counts jumps to another position, which live iterators have to follow.
        self.turn = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next samples."""
        return self._handed.epoch

    @property
    def consumed(self) -> int:
        """Samples of the epoch that all ranks were handed; `state_dict` has the committed ones."""
        return self._handed.consumed

    @property
    def position(self) -> Position:
        """The position of the next samples."""
        return self._handed

    def world(self) -> OwnRank:
        """This rank and its world size: as given, else the current ones."""
        return own_rank(self._rank, self._size)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless it is the current one.

        Not required: an iterator that reaches its end moves on to the next epoch.
        """
        if epoch != self._handed.epoch:
            self._handed = Position(epoch)
            self.turn += 1

    # --- called by loaders -----------------------------------------------------------------------

    def hand_out(self, handed: Handed, after: Position) -> None:
        """Note that the training got these samples; the next are at `after`."""
        self._in_flight.append(handed)
        self._handed = after

    def end_epoch(self) -> None:
        """Move to the next epoch. Not a jump: iterators of this epoch end."""
        self._handed = Position(self._handed.epoch + 1)

    # --- called by the state ---------------------------------------------------------------------

    @property
    def in_flight(self) -> tuple[Handed, ...]:
        """The samples handed out since the last commit."""
        return tuple(self._in_flight)

    def committed(self) -> None:
        """Commit all samples handed out for the step."""
        self._committed = self._handed
        self.latest = tuple(self._in_flight)
        self._in_flight.clear()

    def state_dict(self) -> dict[str, Any]:
        """The committed position: the same on all ranks, valid for a world of any size."""
        position = self._committed
        return self._form() | {
            "seed": self.seed,
            "epoch": position.epoch,
            "consumed": position.consumed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position in `state`. Live iterators continue from there."""
        for name, ours in self._form().items():
            if state.get(name, ours) != ours:
                raise ConfigError(
                    f"The state was saved with {name}={state[name]}, but here {name}={ours}: the "
                    "order of samples would differ. Use the same data, or do not load the state "
                    "and start an epoch of the new data with set_epoch."
                )
        self.seed = state["seed"]
        self._committed = self._handed = self._position_of(state)
        self._in_flight.clear()
        self.turn += 1

    def _form(self) -> dict[str, Any]:
        """Settings that the order depends on and a state cannot change."""
        return {"shuffle": self.shuffle}

    def _position_of(self, state: dict[str, Any]) -> Position:
        return Position(state["epoch"], state["consumed"])
