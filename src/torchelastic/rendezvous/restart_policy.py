"""Decide whether a job continues after a generation has ended, and say why. Pure.

The budget belongs to the whole job, so the ledger is part of the world and survives its leader. A
generation has made progress when it got beyond the best step of those before it:

    ended by                                 same again, no progress   10 minutes, steps unknown
    an exception                             5 times: the job ends     refill nothing
    an exit code or a crash without error    5 times: the job ends     refill the budget
    a kill from outside, a lost connection   never the same            refill the budget
    an error that no restart can fix         at once: the job ends     -
    the same, but not on the nodes that stay uses no restart           -

"The same" is the type of the exception, the innermost frame of user code and the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchelastic.events.failure import Failure
from torchelastic.records import replace
from torchelastic.rendezvous import root_cause

#: What ended a generation. A worker's failure or error spends a restart; the others do not.
Kind = Literal["failure", "error", "node-failure", "leave", "resize", "finished"]

#: The same failure this often in a row, without progress, ends the job.
SAME_FAILURE_LIMIT = 5
#: A generation whose steps are unknown may have made progress in this time.
PROGRESS_AFTER = 600.0
#: A failure this soon after the start, without a step, is likely to come as soon again.
IN_VAIN = 1.0
#: Seconds before another generation where the last two were in vain; twice as many each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0


@dataclass(frozen=True, kw_only=True)
class RestartLedger:
    """The restarts that the job has used so far, and its progress."""

    used: int = 0
    #: How often in a row the same failure came back without progress, and its signature.
    repeats: int = 0
    signature: str = ""
    #: The highest step any generation has reported.
    best_step: int = -1
    #: How many generations in a row have failed as soon as they began, without a step.
    in_vain: int = 0


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a generation."""

    kind: Kind
    #: Seconds from its world to its end.
    lifetime: float
    failure: Failure | None = None
    step: int = -1
    #: Whether a world of the job has trained, and whether all nodes of this one failed alike.
    trained: bool = False
    everywhere: bool = True
    #: Whether the next world does without the nodes that failed.
    without: bool = False


@dataclass(frozen=True)
class Verdict:
    """The decision to continue or not, and the reason."""

    go_on: bool
    ledger: RestartLedger
    sentence: str


def judge(ending: Ending, ledger: RestartLedger, *, budget: int, count_resizes: bool) -> Verdict:
    """Charge an ended generation to the ledger.

    >>> judge(Ending(kind="resize", lifetime=9.0), RestartLedger(), budget=0, count_resizes=False)
    Verdict(go_on=True, ledger=RestartLedger(used=0, repeats=0, signature='', best_step=-1, \
in_vain=0), sentence='a resize uses no restart')
    """
    ledger = _credit_progress(ending, _note_haste(ending, ledger))
    failure = ending.failure
    if failure is not None and failure.fatal:
        return Verdict(False, ledger, "a restart cannot help")
    if failure is not None and failure.incurable and _is_hopeless(ending, ledger, failure):
        return Verdict(False, ledger, f"a restart cannot fix this {failure.kind}; giving up")
    if failure is not None and failure.incurable and ending.without:
        return Verdict(True, _note_failure(ending, ledger), "no restart used")
    if ending.kind == "error":
        return _judge_error(ending, ledger, budget)
    if ending.kind != "failure" and not count_resizes:
        return Verdict(True, ledger, f"a {_words(ending.kind)} uses no restart")
    ledger = _note_failure(ending, ledger)
    if failure is not None and ledger.repeats >= SAME_FAILURE_LIMIT:
        return Verdict(False, ledger, _same(failure, ledger.repeats))
    if ledger.used >= budget:
        return Verdict(False, ledger, _spent(budget))
    ledger = replace(ledger, used=ledger.used + 1)
    return Verdict(True, ledger, f"{ledger.used} of {budget} restarts used")


def pause(ledger: RestartLedger) -> float:
    """Seconds before the next generation begins.

    None at first: most failures are over when they are noticed. But if no world can form, because
    of a firewall between two nodes for example, generations would fail within milliseconds until
    all restarts are used, long before anybody could fix it.

    >>> [pause(RestartLedger(in_vain=count)) for count in (0, 1, 2, 3, 4, 99)]
    [0.0, 0.0, 0.25, 0.5, 1.0, 30.0]
    """
    if ledger.in_vain < 2:
        return 0.0
    return min(FIRST_PAUSE * 2.0 ** min(ledger.in_vain - 2, 20), LONGEST_PAUSE)


def why_pause(ledger: RestartLedger) -> str:
    """The sentence for users during the pause."""
    return (
        f"the last {ledger.in_vain} generations failed right after start, before their first "
        f"step; the next one starts in {pause(ledger):g} s"
    )


def _judge_error(ending: Ending, ledger: RestartLedger, budget: int) -> Verdict:
    """Judge an error after which the worker rolled back and lives on: retry the step, but not
    forever."""
    assert ending.failure is not None, "an error needs a failure"
    signature = _signature(ending.failure)
    if signature == ledger.signature:
        sentence = f"same error again at step {ending.failure.step} after a rollback"
        return Verdict(False, ledger, f"{sentence}; giving up")
    if ledger.used >= budget:
        return Verdict(False, ledger, _spent(budget))
    ledger = replace(ledger, used=ledger.used + 1, repeats=1, signature=signature)
    return Verdict(True, ledger, f"{ledger.used} of {budget} restarts used")


def _is_hopeless(ending: Ending, ledger: RestartLedger, failure: Failure) -> bool:
    """Return whether no node has shown that the program can run, and none is left that might."""
    again = ledger.signature == _signature(failure)
    return ending.everywhere or (not ending.trained and (again or not ending.without))


def _same(failure: Failure, times: int) -> str:
    where = [failure.place, f"step {failure.step}" if failure.step is not None else ""]
    shown = ", ".join(filter(None, where))
    what = "error" if failure.told else "failure"
    return f"same {what} {times} times without progress{shown and f' ({shown})'}; giving up"


def _spent(budget: int) -> str:
    if budget == 0:
        return "no restarts are allowed (--max-restarts 0)"
    return f"all {budget} restarts used (--max-restarts)"


def _words(kind: Kind) -> str:
    return kind.replace("-", " ")


def _credit_progress(ending: Ending, ledger: RestartLedger) -> RestartLedger:
    """Refill the budget when the generation got further than any before it."""
    if ending.step > ledger.best_step:
        return RestartLedger(best_step=ending.step)
    if _may_have_progressed(ending, ledger) and not _is_own_exception(ending.failure):
        return replace(ledger, used=0)
    return ledger


def _may_have_progressed(ending: Ending, ledger: RestartLedger) -> bool:
    """Return whether progress is unknown: the job reports no steps, and the generation ran for a
    while."""
    return ledger.best_step < 0 and ending.step < 0 and ending.lifetime >= PROGRESS_AFTER


def _note_haste(ending: Ending, ledger: RestartLedger) -> RestartLedger:
    """Count generations that failed right after start. The arrival or departure of a node proves
    nothing; nor does a node failure, because the next world is without it, nor a kill from outside,
    which says nothing about the next generation."""
    if ending.lifetime >= IN_VAIN:
        return replace(ledger, in_vain=0)
    counts = ending.kind in ("failure", "error") and not is_from_outside(ending.failure)
    return replace(ledger, in_vain=ledger.in_vain + counts)


def is_from_outside(failure: Failure | None) -> bool:
    """Return whether a worker was killed from outside without an error of its own. An out-of-memory
    kill by the kernel does not count: it will happen again."""
    if failure is None or failure.told or failure.out_of_memory:
        return False
    return failure.exitcode in (-9, -15)


def _is_own_exception(failure: Failure | None) -> bool:
    """Return whether the script raised, other than because of a lost connection."""
    return failure is not None and failure.told and not root_cause.lost_connection(failure)


def _note_failure(ending: Ending, ledger: RestartLedger) -> RestartLedger:
    """Count repetitions of the same failure. A kill or a lost connection says nothing about the
    script, so the script's next failure is compared with the one before."""
    failure = ending.failure
    if failure is None or is_from_outside(failure) or root_cause.lost_connection(failure):
        return ledger
    if not failure.told and _may_have_progressed(ending, ledger):
        return replace(ledger, repeats=0, signature="")
    signature = _signature(failure)
    repeats = ledger.repeats + 1 if signature == ledger.signature else 1
    return replace(ledger, repeats=repeats, signature=signature)


def _signature(failure: Failure) -> str:
    return repr((*failure.signature(), failure.step))
