"""`ElasticStream`: records in numbered shards whose length is unknown.

The order of an epoch: the shards are shuffled, their records follow one after the other, and are
shuffled within windows of a fixed size. It depends on the seed and the epoch alone.

The length of a shard is known only after reading it. So every rank, and each of its loading
processes, reads the whole epoch and decodes only its own share of every step: then all agree on who
takes the next record without communicating. The position in a stream is the number of records
consumed and where to start reading: the shard, counted in the epoch's order, and the first record
of the current window in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from torchelastic.data.order import Order
from torchelastic.data.own_rank import OwnRank
from torchelastic.data.progress import DataProgress, Handed, Position
from torchelastic.data.shares import Policy, batch_of, share_of, shares_of
from torchelastic.errors import ConfigError

#: `read(shard, first)`: the records of a shard, starting with record `first`.
Read = Callable[[int, int], Iterable[Any]]


class ElasticStream(DataProgress):
    """Records in shards 0 to `shards` - 1, read by `read(shard, first)`; or a list of iterables.

    `first` is the record to start with: if a shard cannot be opened in the middle, skip that many
    records. `read` must return the same records each time. Pass the stream to a
    `torchelastic.data.DataLoader` as its dataset, and to the TorchState as a part.

    `decode(record)` is called for the records of this rank only: put expensive work there. Records
    are shuffled within windows of `window` records; one window is held in memory, and is read again
    after a roll-back. If the number of records is known, prefer a dataset with an ElasticSampler:
    it shuffles all records and reads nothing twice.
    """

    def __init__(
        self,
        read: Read | Sequence[Iterable[Any]],
        shards: int | None = None,
        *,
        decode: Callable[[Any], Any] | None = None,
        shuffle: bool = True,
        window: int = 1024,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(seed=seed, shuffle=shuffle, rank=rank, size=size)
        self.read, self.shards = _reader(read, shards)
        self.decode = decode
        if window < 1:
            raise ConfigError(f"window is {window}: it must be at least 1 record.")
        self.window = window if shuffle else 1
        self.drop_last = drop_last

    def state_dict(self) -> dict[str, Any]:
        place = self._committed
        return super().state_dict() | {"shard": place.shard, "offset": place.offset}

    def _form(self) -> dict[str, Any]:
        return {"shards": self.shards, "shuffle": self.shuffle, "window": self.window}

    def _position_of(self, state: dict[str, Any]) -> Position:
        return Position(state["epoch"], state["consumed"], state["shard"], state["offset"])


class StreamRecord(NamedTuple):
    """A record, its shard, its number in the shard, and the position after it."""

    shard: int
    number: int
    content: Any
    after: Position


def records_from(stream: ElasticStream, seed: int, place: Position) -> Iterator[StreamRecord]:
    """Yield the rest of the epoch from this position on, in its order."""
    epoch, consumed, *begin = place
    records = _in_shards(stream, Order(stream.shards, seed, epoch, shuffle=stream.shuffle), *begin)
    for number in count(consumed // stream.window):
        window = list(islice(records, stream.window))
        if not window:
            return
        order = Order(len(window), seed, epoch, number, shuffle=stream.shuffle)
        (at, next_record), first = window[-1][0], consumed % stream.window
        for index, chosen in enumerate(order.at(first, len(window)), first + 1):
            _, shard, record, content = window[chosen]
            consumed += 1
            if index == len(window):
                begin = [at, next_record + 1]
            yield StreamRecord(shard, record, content, Position(epoch, consumed, *begin))


def _in_shards(
    stream: ElasticStream, order: Order, begin: int, offset: int
) -> Iterator[tuple[tuple[int, int], int, int, Any]]:
    """Yield position in the epoch, shard, number and record, shard after shard."""
    for at in range(begin, stream.shards):
        shard = order.at(at, at + 1)[0]
        for number, content in enumerate(stream.read(shard, offset), offset):
            yield (at, number), shard, number, content
        offset = 0


class StreamStep(NamedTuple):
    """A request to load step `number` after `place`, for a rank of a world."""

    seed: int
    place: Position
    rank: int
    size: int
    number: int


@dataclass(frozen=True)
class LoadedStep:
    """A loaded step: this rank's records, and the position after the step."""

    records: Any
    handed: Handed
    after: Position


class StreamSteps(Dataset[Any]):
    """A stream as torch's loading processes see it: a dataset whose samples are steps.

    Each process has its own copy, which remembers how far it has read. It skips steps that another
    process loads.
    """

    def __init__(self, stream: ElasticStream, policy: Policy, *, drop_last: bool) -> None:
        self._stream, self._policy, self._drop_last = stream, policy, drop_last
        #: The number of the step to read next, counted from the position of `_begun`.
        self._next = 0
        self._begun: StreamStep | None = None
        self._records: Iterator[StreamRecord] = iter(())

    def __getitem__(self, step: StreamStep) -> LoadedStep | None:
        """None at the end of the epoch."""
        begun = step._replace(number=0)
        if begun != self._begun or step.number < self._next:
            self._next = 0
            self._records = records_from(self._stream, step.seed, step.place)
        # Unset while reading: a generator that raised an error would look exhausted.
        self._begun = None
        batch = batch_of(self._policy, step.size)
        while self._next <= step.number:
            records = list(islice(self._records, batch))
            self._next += 1
        self._begun = begun
        if not records or (self._drop_last and len(records) < batch):
            return None
        return self._share(step, records)

    def _share(self, step: StreamStep, records: list[StreamRecord]) -> LoadedStep:
        after = records[-1].after
        end = after.consumed
        shares = shares_of(self._policy, step.size, len(records))
        share = share_of(step.rank, shares, 0)
        own = records[share.start : share.stop]
        ids = tuple((record.shard, record.number) for record in own)
        handed = Handed(after.epoch, step.rank, step.size, (end - len(records), end), ids)
        decode = self._stream.decode or (lambda record: record)
        # A rank without a share gets a placeholder record: the others wait for its collectives.
        return LoadedStep([decode(record.content) for record in own or records[:1]], handed, after)

    def __getstate__(self) -> dict[str, Any]:
        """State for a spawned loading process, without open files."""
        return vars(self) | {"_begun": None, "_records": iter(())}


class CollateStep:
    """Collates the records of a step into a batch, in the loading process."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, loaded: list[LoadedStep | None]) -> tuple[Any, Handed, Position] | None:
        (step,) = loaded
        return None if step is None else (self._collate(step.records), step.handed, step.after)


class StreamFeed:
    """Requests for one step after another; a loading process finds the end of the epoch."""

    turn = 0

    def __init__(self, stream: ElasticStream) -> None:
        self.progress = stream
        self._begin = StreamStep(stream.seed, Position(), 0, 1, 0)

    def begin(self, world: OwnRank) -> None:
        stream = self.progress
        self._begin = StreamStep(stream.seed, stream.position, *world, 0)

    def __iter__(self) -> Iterator[list[StreamStep]]:
        begin = self._begin
        return ([begin._replace(number=number)] for number in count())

    def unfold(self, loaded: Any) -> tuple[Any, Handed, Position]:
        if loaded is None:
            raise StopIteration
        batch, handed, after = loaded
        return batch, handed, Position(*after)


def _reader(read: Read | Sequence[Iterable[Any]], shards: int | None) -> tuple[Read, int]:
    if callable(read):
        if shards is None or shards < 0:
            raise ConfigError("Pass shards, the number of shards, together with a read function.")
        return read, shards
    if shards not in (None, len(read)):
        raise ConfigError(f"shards is {shards}, but the list has {len(read)} shards.")
    return _Given(read), len(read)


class _Given:
    """Reads shards that are iterables."""

    def __init__(self, shards: Sequence[Iterable[Any]]) -> None:
        self._shards = shards

    def __call__(self, shard: int, first: int) -> Iterator[Any]:
        return islice(self._shards[shard], first, None)
