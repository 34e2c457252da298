"""Progress that the agent cannot see by itself: samples trained, micro-batches run, checkpoints in
storage, hashes of the weights, steps with bad numbers.

The numbers go to the status page with every step (`worker.status_page`); a worker's bootstrap
listens for the rest and reports it to the agent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

#: Samples of committed steps on all ranks; -1: not counted.
samples = -1
#: Micro-batches that this worker ran of its last step with `BatchPolicy.fixed`; -1: not counted.
micro_batches = -1

#: The most samples in a message, which has a limited length (`worker.channel.LIMIT`).
SAMPLES_LIMIT = 2000
#: What else is said of a rank's samples takes as much room as this many samples.
_LENGTH_WITHOUT_IDS = 3

#: Called with a message for the agent (`worker.orders`), in the thread that has it.
Listener = Callable[[dict[str, Any]], object]

_listener: Listener | None = None
#: Called when the program returns.
_at_end: Callable[[], None] | None = None


def listen(listener: Listener) -> None:
    """Call `listener` for every message."""
    global _listener
    _listener = listener


def is_heard() -> bool:
    """Return whether anyone listens."""
    return _listener is not None


def checkpoint_stored(step: int, seconds: float, size: int) -> None:
    """Report that a checkpoint is in storage: the seconds it took to write, and its bytes. Called
    on one rank."""
    if _listener is not None:
        _listener({"type": "stored", "step": step, "seconds": seconds, "size": size})


def weights_hashed(step: int, sha256: str, *, final: bool = False) -> None:
    """Report the hash of the weights in a checkpoint or, `final`, at the end of the training.
    Called on one rank."""
    if _listener is not None:
        _listener({"type": "hashed", "step": step, "sha256": sha256, "final": final})


def step_was_bad(
    *,
    step: int,
    rank: int,
    reason: str,
    norm: float,
    loss: float | None,
    deviation: float,
    is_origin: bool,
    samples: Iterable[Mapping[str, Any]],
    micro_batches: Iterable[int],
    action: str,
) -> None:
    """Report a step with bad numbers, and what is done about it. Called on every rank:
    `step_was_bad(**asdict(bad), action="skip")` with a `training.step_guard.BadStep`."""
    if _listener is None:
        return
    for some in _portions(samples):
        _listener(
            {
                "type": "badstep",
                "step": step,
                "rank": rank,
                "reason": reason,
                "norm": _number(norm),
                "loss": None if loss is None else _number(loss),
                "deviation": deviation,
                "is_origin": is_origin,
                "action": action,
                "samples": some,
                "micro_batches": list(micro_batches),
            }
        )


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


def _portions(samples: Iterable[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the samples in portions that fit into a message; at least one, perhaps empty."""
    portion, length = list[dict[str, Any]](), 0
    for one in samples:
        ids = [_plain(sample) for sample in one["ids"]]
        for start in range(0, max(len(ids), 1), SAMPLES_LIMIT):
            some = ids[start : start + SAMPLES_LIMIT]
            if portion and length + len(some) > SAMPLES_LIMIT:
                yield portion
                portion, length = [], 0
            portion.append({**one, "ids": some})
            length += len(some) + _LENGTH_WITHOUT_IDS
    yield portion


def _plain(sample: Any) -> int | list[int]:
    """A number, perhaps of numpy or torch, or a pair of them."""
    return [int(one) for one in sample] if isinstance(sample, list | tuple) else int(sample)


def at_end(call: Callable[[], None]) -> None:
    """Call this when the program returns: a script does not say when its training ends."""
    global _at_end
    _at_end = call


def ended() -> None:
    """The program returns."""
    if _at_end is not None:
        _at_end()
