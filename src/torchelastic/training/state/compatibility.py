"""Whether the states of a world are of one form. Who differs from the freshest fails, alone.

Every worker builds its first state itself, and one with another script, or other arguments, builds
another model. Sent what the others have, it could do nothing with it, and its error would be the
whole world's, again and again. So before anything is sent each worker tells a number made from its
state's form. Who has another number than the one with the freshest state ends, saying what is
different; the others wait for the next world, which is without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torchelastic.errors import UnfitError
from torchelastic.tensors.module_state import Form, form_text
from torchelastic.training.group.waits import GenerationOver, PeerLostError

if TYPE_CHECKING:
    from torchelastic.training.session import Session

#: How long who does not fit waits to be told how the others are, before it ends without knowing.
PATIENCE = timedelta(seconds=5)


def check(world: Session, form: Form) -> None:
    """Raise UnfitError if this worker's state is of another form; GenerationOver if a peer's is."""
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
    raise GenerationOver(f"Rank {others[0]} has a state that is not of this training's form.")


def _told(world: Session, key: str) -> Form | None:
    """The form of the others, from the store; None: nobody has told it. An abort ends the wait."""

    def get() -> bytes:
        world.store.wait([key], PATIENCE)
        return bytes(world.store.get(key))

    try:
        found: Any = json.loads(world.group.waits.call(get))
    except PeerLostError:
        return None  # it does not fit all the same, and would come again as a peer that was lost
    return [(str(what), str(how)) for what, how in found]


def _sentence(own: Form, others: Form | None) -> str:
    return (
        f"This worker's state does not fit into the training: {_difference(own, others)}. "
        "Start it with the script and the arguments that the others have."
    )


def _difference(own: Form, others: Form | None) -> str:
    found = _differences(own, others) if others is not None else iter(())
    return next(found, "it is not like that of the others")


def _differences(own: Form, others: Form) -> Iterator[str]:
    """What is different, in words."""
    mine, theirs = dict(own), dict(others)
    for what, how in own:
        if what not in theirs:
            yield f"it has {what}, which the others do not have"
        elif theirs[what] != how:
            yield f"{what} is {how} here and {theirs[what]} in the others"
    yield from (f"it lacks {what}, which the others have" for what in theirs if what not in mine)
    for (mine_next, _), (theirs_next, _) in zip_longest(own, others, fillvalue=("nothing", "")):
        if mine_next != theirs_next:
            yield f"it has {mine_next} where the others have {theirs_next}"
