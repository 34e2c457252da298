"""Fault injection at exact places: `faults.at("step.begin")` does nothing without a plan.

A plan is a text, usually in `TORCHELASTIC_FAULTS`: faults separated by `;`, each a kind and the
conditions under which it strikes:

    kill@rank=1,step=3,place=collective.before;stop@rank=0,step=5,place=step.begin

Kinds: `kill` and `stop` (SIGKILL and SIGSTOP to this process), `raise` (a `FaultInjected`), `exit`
(exit code 1, without clean-up), `sleep=SECONDS`.

Conditions: `place` is required. Without `rank` or `step`, any matches. `generation` defaults to 0,
so that a fault does not also kill the replacement worker; `any` matches every generation. `n=2` is
the second time that the step passes the place (default 1). A fault strikes whenever all match.

`PLACES` lists the places in the order in which a step passes them.
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
    "micro_batch.begin",
    "collective.before",
    "collective.launched",
    "collective.after",
    "optimizer.before",
    "joint.before",
    "joint.after",
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
    """The error that kind `raise` raises."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault and its conditions. None means any."""

    kind: str
    place: str
    rank: int | None = None
    step: int | None = None
    generation: int | None = 0
    n: int = 1
    #: Duration of a `sleep`.
    seconds: float = 0.0


_plan: tuple[Fault, ...] = ()
#: True if there is a plan. Places that every step passes check this first, because it is cheap:
#: `if faults.planned: faults.at(...)`.
planned = False
_rank = _step = _generation = -1
#: How often a step has passed a place.
_passed: Counter[tuple[str, int]] = Counter()


def at(place: str, *, step: int | None = None) -> None:
    """Inject the faults planned for this place, if any.

    `step` is for threads that work in parallel with training: they may pass a place of step 3 when
    the training is at step 4 already. None is the current step.
    """
    if _plan:
        _pass(place, _step if step is None else step)


def position(*, rank: int, step: int, generation: int) -> None:
    """Set where this process is in its training. A step that begins again counts from 0."""
    global _rank, _step, _generation
    _rank, _step, _generation = rank, step, generation
    for passed in list(_passed):
        if passed[1] != step - 1:  # a thread may still be working on the step before
            _passed.pop(passed, None)


def plan(text: str) -> None:
    """Replace the plan; an empty text removes it."""
    global _plan, planned
    _plan = parse(text)
    planned = bool(_plan)
    _passed.clear()


def load() -> None:
    """Read the plan from the environment.

    Called when training starts, not on import: a zygote imports this long before a worker has its
    environment. Without a plan in the environment, one set by `plan` stays.
    """
    if text := env.get(VARIABLE):
        plan(text)


def parse(text: str) -> tuple[Fault, ...]:
    """Parse a plan; a `ConfigError` names the fault that is wrong."""
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
        raise ConfigError(f"The fault '{text}' in {VARIABLE} is not valid: {error}.") from None
    if conditions or kind not in KINDS or made.place not in PLACES:
        wrong = next(iter(conditions), kind if kind not in KINDS else made.place)
        raise ConfigError(f"The fault '{text}' in {VARIABLE} has an unknown '{wrong}'.")
    return made


def _number(text: str) -> int | None:
    return None if text == "any" else int(text)


def _pass(place: str, step: int) -> None:
    _passed[place, step] += 1
    for fault in _plan:
        if _strikes(fault, place, step, _passed[place, step]):
            _strike(fault, step)


def _strikes(fault: Fault, place: str, step: int, time_passed: int) -> bool:
    return (
        fault.place == place
        and fault.n == time_passed
        and fault.rank in (None, _rank)
        and fault.step in (None, step)
        and fault.generation in (None, _generation)
    )


def _strike(fault: Fault, step: int) -> None:
    where = f"{fault.place} of rank {_rank}, step {step}, generation {_generation}"
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "exit":
        os._exit(1)
    elif fault.kind == "sleep":
        time.sleep(fault.seconds)
    else:
        raise FaultInjected(f"Injected fault at {where}.")
