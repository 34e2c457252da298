"""The check that all states of a world have one form. A worker that differs fails alone.

Every worker builds its first state itself. With a different script or arguments it builds a
different model, cannot load the others' state, and would fail the whole world, again and again. So
before any state is sent, each worker publishes a number made from its state's form. A worker whose
number differs from that of the freshest state ends and reports the difference; the others wait for
the next world, which is without it.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchelastic.errors import UnfitError
from torchelastic.tensors.module_state import Form, differences, form_text
from torchelastic.training.group.abortable_waits import GenerationOver, PeerLostError

if TYPE_CHECKING:
    from torchelastic.training.session import Session

#: How long an incompatible worker waits for the others' form before it ends without it.
FORM_TIMEOUT = timedelta(seconds=5)


def check(world: Session, form: Form) -> None:
    """Raise UnfitError if this worker's state has another form, GenerationOver if a peer's has."""
    holder = world.versions.index(max(world.versions))
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
        world.store.wait([key], FORM_TIMEOUT)
        return bytes(world.store.get(key))

    try:
        found: Any = json.loads(world.group.waits.call(get))
    except PeerLostError:
        return None  # incompatible all the same; otherwise reported again and again as a lost peer
    return [(str(what), str(how)) for what, how in found]


def _sentence(own: Form, others: Form | None) -> str:
    found = iter(()) if others is None else differences(own, others, "this worker", "the others")
    return (
        "This worker's state differs from the other workers': "
        f"{next(found, 'the difference is unknown')}. "
        "Start all workers with the same script and arguments."
    )
