"""Decide if there is time for a checkpoint before this worker leaves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: Allowance over the time of the last checkpoint: other workers may be saving too.
MARGIN = 1.5


@dataclass(frozen=True)
class Decision:
    save: bool
    #: For the log.
    why: str


def decide(
    *, grace: float | None, expected: float | None, step: int, saved: int | None
) -> Decision:
    """Decide with `grace` seconds left (None: unknown), if a checkpoint takes `expected` seconds
    (None: never measured), `step` steps are committed, and `saved` of them are in storage.
    """
    if saved is not None and saved >= step:
        return Decision(False, f"the checkpoint of step {step} is already in storage")
    if grace is None or expected is None or expected * MARGIN <= grace:
        return Decision(True, f"saving a checkpoint of step {step} first")
    return Decision(
        False,
        f"no checkpoint of step {step}: it takes {expected:.1f} s, and {grace:.1f} s are left",
    )
