"""Whether there is time for a checkpoint before this worker has to go. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: A checkpoint takes so much longer than the last one at worst: everybody else may be leaving too.
MARGIN = 1.5


@dataclass(frozen=True)
class Decision:
    save: bool
    #: For the log.
    why: str


def decide(
    *, grace: float | None, expected: float | None, step: int, saved: int | None
) -> Decision:
    """`grace` seconds are left (None: nobody says), one is expected to take `expected` (None:
    never measured), `step` steps are committed, and `saved` of them are in storage.
    """
    if saved is not None and saved >= step:
        return Decision(False, f"the checkpoint of step {step} is already in storage")
    if grace is None or expected is None or expected * MARGIN <= grace:
        return Decision(True, f"saving a checkpoint of step {step} first")
    return Decision(
        False,
        f"no checkpoint of step {step}: it takes {expected:.1f} s, and {grace:.1f} s are left",
    )
