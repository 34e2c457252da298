"""Faults at exact places: `faults.at("step.begin")` does nothing, unless a plan says otherwise.

A plan is a text, usually in `TORCHELASTIC_FAULTS`: faults separated by `;`, each a kind and the
conditions under which it strikes:

    kill@rank=1,step=3,place=collective.before;stop@rank=0,step=5,place=step.begin

Kinds: `kill` and `stop` (SIGKILL and SIGSTOP to this process), `raise` (a `FaultInjected`), `exit`
(exit code 1, without clean-up), `sleep=SECONDS`.

Conditions: `place` is needed. A `rank` or `step` that is not given is any. `generation` is 0 unless
given, so that a replacement does not die of what killed the first; `any` is every one. `n=2` is the
second time the place is passed in the step, and 1 unless given. A fault strikes whenever all hold.

The places, in the order in which a step passes them, are `PLACES`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass

from torchelastic import env
from torchelastic.errors import ConfigError

VARIABLE = "TORCHELASTIC_FAULTS"

PLACES = (
    "group.build",
    "sync.begin",
    "sync.end",
    "step.begin",
    "collective.before",
    "collective.launched",
    "collective.after",
    "optimizer.before",
    "optimizer.inside",
    "optimizer.after",
    "step.end",
    "checkpoint.write",
    "snapshot.begun",
    "snapshot.copy",
    "snapshot.skeleton",
    "snapshot.sealing",
)
KINDS = ("kill", "stop", "raise", "exit", "sleep")


class FaultInjected(RuntimeError):
    """The error of kind `raise`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What strikes, and when. None means any."""

    kind: str
    place: str
    rank: int | None = None
    step: int | None = None
    generation: int | None = 0
    n: int = 1
    #: How long a `sleep` takes.
    seconds: float = 0.0


_plan: tuple[Fault, ...] = ()
#: Whether anything is. It is not in ordinary life, and places that are passed in every step ask
#: first: `if faults.planned: faults.at(...)` costs the test of a name.
planned = False
_rank = _step = _generation = -1
#: How often each place was passed in the present step.
_passed: Counter[str] = Counter()


def at(place: str) -> None:
    """This place is passed now."""
    if _plan:
        _pass(place)


def position(*, rank: int, step: int, generation: int) -> None:
    """Where this process is in its training; a new step counts its places anew."""
    global _rank, _step, _generation
    _rank, _step, _generation = rank, step, generation
    if _passed:
        _passed.clear()


def plan(text: str) -> None:
    """Replace the plan; an empty text is no plan."""
    global _plan, planned
    _plan = parse(text)
    planned = bool(_plan)
    _passed.clear()


def load() -> None:
    """Take the plan from the environment.

    Called when training starts and not on import: a zygote imports long before a worker has its
    environment. A plan made by `plan` stays when the environment has none.
    """
    if text := env.get(VARIABLE):
        plan(text)


def parse(text: str) -> tuple[Fault, ...]:
    """The faults of a plan; `ConfigError` names the one that is wrong."""
    return tuple(_fault(item) for part in text.split(";") if (item := part.strip()))


def _fault(text: str) -> Fault:
    head, _, tail = text.partition("@")
    kind, _, seconds = head.strip().partition("=")
    pairs = [pair.partition("=")[::2] for pair in tail.split(",")]
    conditions = {name.strip(): value.strip() for name, value in pairs}
    try:
        made = Fault(
            kind=kind,
            place=conditions.pop("place"),
            rank=_number(conditions.pop("rank", "any")),
            step=_number(conditions.pop("step", "any")),
            generation=_number(conditions.pop("generation", "0")),
            n=int(conditions.pop("n", "1")),
            seconds=float(seconds or 0.0),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(f"The fault '{text}' in {VARIABLE} is not understood: {error}.") from None
    if conditions or kind not in KINDS or made.place not in PLACES:
        wrong = next(iter(conditions), kind if kind not in KINDS else made.place)
        raise ConfigError(f"The fault '{text}' in {VARIABLE} has an unknown '{wrong}'.")
    return made


def _number(text: str) -> int | None:
    return None if text == "any" else int(text)


def _pass(place: str) -> None:
    _passed[place] += 1
    for fault in _plan:
        if _strikes(fault, place, _passed[place]):
            _strike(fault)


def _strikes(fault: Fault, place: str, time_passed: int) -> bool:
    return (
        fault.place == place
        and fault.n == time_passed
        and fault.rank in (None, _rank)
        and fault.step in (None, _step)
        and fault.generation in (None, _generation)
    )


def _strike(fault: Fault) -> None:
    where = f"{fault.place} of rank {_rank}, step {_step}, generation {_generation}"
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "exit":
        os._exit(1)
    elif fault.kind == "sleep":
        time.sleep(fault.seconds)
    else:
        raise FaultInjected(f"A fault was planned at {where}.")
