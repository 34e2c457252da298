"""Whether a job whose generation has ended goes on: a pure decision that explains itself.

The budget belongs to the whole job, so the ledger travels in the world and survives its leader.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torchelastic.failure import Failure

#: What ended a generation. A worker's failure or error spends a restart; the others do not.
Kind = Literal["failure", "error", "node-failure", "leave", "resize", "finished"]

#: So many equal failures in a row, each at once, are no accident: no restart will mend them.
SAME_FAILURE_LIMIT = 5
#: A failure this soon after the start counts as "at once".
AT_ONCE = 10.0
#: A generation that lived this long has made progress, whether or not it reported steps.
PROGRESS_AFTER = 600.0


@dataclass(frozen=True, kw_only=True)
class RestartLedger:
    """What the job has spent so far."""

    used: int = 0
    #: How often in a row the same failure came back at once, and its signature.
    repeats: int = 0
    signature: str = ""
    #: The highest step any generation has reported.
    best_step: int = -1


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a generation ended."""

    kind: Kind
    #: Seconds from its world to its end.
    lifetime: float
    failure: Failure | None = None
    step: int = -1


@dataclass(frozen=True)
class Verdict:
    """Whether the job goes on, and why, in a sentence."""

    go_on: bool
    ledger: RestartLedger
    sentence: str


def judge(ending: Ending, ledger: RestartLedger, *, budget: int, count_resizes: bool) -> Verdict:
    """Charge an ended generation to the ledger.

    >>> judge(Ending(kind="resize", lifetime=9.0), RestartLedger(), budget=0, count_resizes=False)
    Verdict(go_on=True, ledger=RestartLedger(used=0, repeats=0, signature='', best_step=-1), \
sentence='a resize spends no restart')
    """
    ledger = _credit_progress(ending, ledger)
    if ending.failure is not None and ending.failure.fatal:
        return Verdict(False, ledger, "trying again cannot help")
    if ending.kind == "error":
        return _judge_error(ending, ledger, budget)
    if ending.kind != "failure" and not count_resizes:
        return Verdict(True, ledger, f"a {_words(ending.kind)} spends no restart")
    ledger = _note_failure(ending, ledger)
    if ledger.repeats >= SAME_FAILURE_LIMIT:
        return Verdict(
            False,
            ledger,
            f"the same failure came back at once {ledger.repeats} times in a row: "
            "restarting does not mend it",
        )
    if ledger.used >= budget:
        return Verdict(False, ledger, _spent(budget))
    ledger = replace(ledger, used=ledger.used + 1)
    return Verdict(True, ledger, f"{ledger.used} of {budget} restarts used")


def _judge_error(ending: Ending, ledger: RestartLedger, budget: int) -> Verdict:
    """A worker raised, rolled back and lives on: the step is tried again, but not for ever."""
    assert ending.failure is not None, "an error is somebody's"
    signature = repr((ending.failure.signature(), ending.failure.step))
    if signature == ledger.signature:
        sentence = f"the same error came back at step {ending.failure.step} after a rollback"
        return Verdict(False, ledger, f"{sentence}: trying again does not mend it")
    if ledger.used >= budget:
        return Verdict(False, ledger, _spent(budget))
    ledger = replace(ledger, used=ledger.used + 1, repeats=1, signature=signature)
    return Verdict(True, ledger, f"{ledger.used} of {budget} restarts used")


def _spent(budget: int) -> str:
    if budget == 0:
        return "no restarts are allowed (--max-restarts 0)"
    return f"all {budget} restarts are used (--max-restarts)"


def _words(kind: Kind) -> str:
    return kind.replace("-", " ")


def _credit_progress(ending: Ending, ledger: RestartLedger) -> RestartLedger:
    """Refill the budget when the generation got further than any before it."""
    if ending.step > ledger.best_step:
        return RestartLedger(best_step=ending.step)
    if ending.lifetime >= PROGRESS_AFTER:
        return RestartLedger(best_step=ledger.best_step)
    return ledger


def _note_failure(ending: Ending, ledger: RestartLedger) -> RestartLedger:
    """Count how often the same failure came at once; signals from outside are never the same."""
    failure = ending.failure
    from_outside = failure is None or (not failure.told and failure.exitcode in (-9, -15))
    if failure is None or from_outside or ending.lifetime > AT_ONCE:
        return replace(ledger, repeats=0, signature="")
    signature = repr(failure.signature())
    repeats = ledger.repeats + 1 if signature == ledger.signature else 1
    return replace(ledger, repeats=repeats, signature=signature)
