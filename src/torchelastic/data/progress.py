"""How far a training is in its data: what was committed, and what was handed out since.

Both are the same on all ranks, because all take the same steps. What is *committed* was trained by
all of them and does not come again. What was only *handed out* belongs to the step in flight:
`committed` makes it count, `load_state_dict` forgets it, and then it comes again.

The end of an epoch is reached when an iterator finds nothing left, which is not a step: until the
next commit the state says that all of this epoch is consumed, and whoever goes on from there finds
nothing left, too. So all ranks see the end of an epoch alike, those that have just come included.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchelastic.data.own_rank import OwnRank, own_rank
from torchelastic.errors import ConfigError

#: The most batches that one step is expected to take.
MOST_IN_FLIGHT = 1024


class Position(NamedTuple):
    """A place in the data. `shard` and `offset` are a stream's, see there."""

    epoch: int = 0
    #: Samples of this epoch that all ranks together have had.
    consumed: int = 0
    shard: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Handed:
    """What this rank was handed for a step, or for a part of one."""

    epoch: int
    rank: int
    size: int
    #: From where (inclusive) to where (exclusive) all ranks went in the order of the epoch.
    span: tuple[int, int]
    #: This rank's samples; none where one only stands in. Of a stream: pairs of shard and number.
    ids: tuple[Any, ...]

    @property
    def total(self) -> int:
        """Samples of all ranks."""
        return self.span[1] - self.span[0]

    @property
    def weight(self) -> float:
        """What this rank's mean loss is multiplied with, so that all samples count alike.

        DDP gives the mean over ranks: with unequal shares that is not the mean over samples.
        """
        return self.size * len(self.ids) / self.total


class Progress:
    """What a sampler and a stream have in common: parts of a state that is committed by steps."""

    def __init__(self, *, seed: int, shuffle: bool, rank: int | None, size: int | None) -> None:
        self.seed, self.shuffle = seed, shuffle
        self._rank, self._size = rank, size
        if rank is not None or size is not None:
            self.world()  # refuses what cannot be
        self._committed = self._handed = Position()
        #: Of each `hand_out` since the last commit; where nobody commits, not of all.
        self._in_flight: deque[Handed] = deque(maxlen=MOST_IN_FLIGHT)
        #: What the last commit has committed.
        self.latest: tuple[Handed, ...] = ()
        #: Counts what live iterators have to follow: jumps to another place.
        self.turn = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next samples are of."""
        return self._handed.epoch

    @property
    def consumed(self) -> int:
        """Samples of the epoch that all ranks together were handed; see `state_dict`, too."""
        return self._handed.consumed

    @property
    def position(self) -> Position:
        """Where the next samples are."""
        return self._handed

    def world(self) -> OwnRank:
        """This rank and the size of its world: as given, else as they are now."""
        return own_rank(self._rank, self._size)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless this is the one.

        There is no need to: an iterator that comes to its end has gone to the next.
        """
        if epoch != self._handed.epoch:
            self._handed = Position(epoch)
            self.turn += 1

    # --- told by loaders -------------------------------------------------------------------------

    def hand_out(self, handed: Handed, after: Position) -> None:
        """The training was given this, and the next is at `after`."""
        self._in_flight.append(handed)
        self._handed = after

    def end_epoch(self) -> None:
        """There was nothing left. Not a jump: iterators that come to the end have ended."""
        self._handed = Position(self._handed.epoch + 1)

    # --- told by the state -----------------------------------------------------------------------

    def committed(self) -> None:
        """The step is committed, and with it all that was handed out for it."""
        self._committed = self._handed
        self.latest = tuple(self._in_flight)
        self._in_flight.clear()

    def state_dict(self) -> dict[str, Any]:
        """What is committed: the same on all ranks, and good for any other world."""
        position = self._committed
        return self._form() | {
            "seed": self.seed,
            "epoch": position.epoch,
            "consumed": position.consumed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what was committed then. Live iterators go on from there."""
        for name, ours in self._form().items():
            if state.get(name, ours) != ours:
                raise ConfigError(
                    f"The state is of data with {name} {state[name]}, but here it is {ours}: the "
                    "order of samples would be another one. Go on with the same data, or begin an "
                    "epoch of the new data with set_epoch instead of loading the state."
                )
        self.seed = state["seed"]
        self._committed = self._handed = self._position_of(state)
        self._in_flight.clear()
        self.turn += 1

    def _form(self) -> dict[str, Any]:
        """What the order depends on and no state can change."""
        return {"shuffle": self.shuffle}

    def _position_of(self, state: dict[str, Any]) -> Position:
        return Position(state["epoch"], state["consumed"])
