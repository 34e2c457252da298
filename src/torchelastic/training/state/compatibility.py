"""The check that all states of a world have one form. A worker that differs fails alone.

Every worker builds its first state itself. With a different script or arguments it builds a
different model, cannot load the others' state, and would fail the whole world, again and again. So
before any state is sent, each worker publishes a number made from its state's form. A worker whose
number differs from that of the freshest state ends and reports the difference; the others wait for
the next world, which is without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torchelastic.errors import UnfitError
from torchelastic.tensors.module_state import Form, form_text
from torchelastic.training.group.abortable_waits import GenerationOver, PeerLostError

if TYPE_CHECKING:
    from torchelastic.training.session import Session

#: How long an incompatible worker waits for the others' form before it ends without it.
PATIENCE = timedelta(seconds=5)


def check(world: Session, form: Form) -> None:
    """Raise UnfitError if this worker's state has another form, GenerationOver if a peer's has."""
    holder = world.versions.index(world.freshest)
    wanted = world.forms[holder]
    others = [rank for rank, number in enumerate(world.forms) if number != wanted]
    if not others:
        return
    key = f"form-{world.generation}"
    if world.rank in others:
        raise UnfitError(_sentence(form, _told(world, key)))
    if world.rank == holder:
        world.store.set(key, form_text(form))
    raise GenerationOver(f"Rank {others[0]} has an incompatible state.")


def _told(world: Session, key: str) -> Form | None:
    """Return the others' form from the store, or None if it timed out. An abort ends the wait."""

    def get() -> bytes:
        world.store.wait([key], PATIENCE)
        return bytes(world.store.get(key))

    try:
        found: Any = json.loads(world.group.waits.call(get))
    except PeerLostError:
        return None  # incompatible all the same; otherwise reported again and again as a lost peer
    return [(str(what), str(how)) for what, how in found]


def _sentence(own: Form, others: Form | None) -> str:
    return (
        f"This worker's state differs from the other workers': {_difference(own, others)}. "
        "Start all workers with the same script and arguments."
    )


def _difference(own: Form, others: Form | None) -> str:
    found = _differences(own, others) if others is not None else iter(())
    return next(found, "the difference is unknown")


def _differences(own: Form, others: Form) -> Iterator[str]:
    """Yield the differences, in words."""
    mine, theirs = dict(own), dict(others)
    for what, how in own:
        if what not in theirs:
            yield f"only this worker has {what}"
        elif theirs[what] != how:
            yield f"{what} is {how} here and {theirs[what]} on the others"
    yield from (f"this worker lacks {what}" for what in theirs if what not in mine)
    for (mine_next, _), (theirs_next, _) in zip_longest(own, others, fillvalue=("nothing", "")):
        if mine_next != theirs_next:
            yield f"this worker has {mine_next} where the others have {theirs_next}"
