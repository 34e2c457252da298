"""Decide whether a job continues after the end of a generation. Pure.

The budget belongs to the whole job, so its history is part of the world and survives the leader. A
generation has made progress when it got beyond the best step of those before it:

    ended by                                 same again, no progress   10 minutes, steps unknown
    an exception                             5 times: the job ends     refill nothing
      on all ranks, before the job trained   2 times: the job ends     -
    an exit code or a crash without error    5 times: the job ends     refill the budget
    a kill from outside, a lost connection   repeats are not counted   refill the budget
    an error that no restart can fix
      on all nodes, or none is left to try   at once: the job ends     -
      if the failed nodes are left out       uses no restart           -

Two failures are the same if the type of the exception, the innermost frame of user code and the
step are equal. An exception that time may cure, of the operating system or a timeout, is always
retried 4 times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchelastic import backoff
from torchelastic.events import words
from torchelastic.events.failure import Failure
from torchelastic.records import replace
from torchelastic.rendezvous import root_cause

#: The kind of a generation's end. A worker's failure or error uses a restart; the others do not.
Kind = Literal["failure", "error", "node-failure", "leave", "resize", "finished"]

#: The number of equal failures in a row, without progress, that ends the job.
SAME_FAILURE_LIMIT = 5
#: The same for an exception on all ranks, before the job has trained.
SAME_START_LIMIT = 2
#: Seconds after which a generation may have made progress, if the job reports no steps.
PROGRESS_AFTER = 600.0
#: A generation that fails within this many seconds, without a step, failed right after start.
START_FAILURE_TIME = 1.0
#: Seconds before the next generation if the last two failed right after start; doubled each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0


@dataclass(frozen=True, kw_only=True)
class RestartHistory:
    """The restarts that the job has used so far, and its progress."""

    used: int = 0
    #: The number of equal failures in a row without progress, and their signature.
    repeats: int = 0
    signature: str = ""
    #: The highest step any generation has reported.
    best_step: int = -1
    #: The number of generations in a row that failed right after start, without a step.
    in_vain: int = 0


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a generation."""

    kind: Kind
    #: Seconds from its world's publication to its end.
    lifetime: float
    failure: Failure | None = None
    step: int = -1
    #: Whether a world of the job has trained, and whether all nodes of this one failed equally.
    trained: bool = False
    everywhere: bool = True
    #: Whether all ranks raised the same exception at the same place.
    all_ranks: bool = False
    #: Whether the next world is without the nodes that failed.
    without: bool = False


@dataclass(frozen=True)
class RestartDecision:
    """The decision to continue or not, and the reason."""

    go_on: bool
    history: RestartHistory
    sentence: str
    #: Starting the job again, on whatever machines, cannot help either.
    incurable: bool = False


def judge(
    ending: Ending, history: RestartHistory, *, budget: int, count_resizes: bool
) -> RestartDecision:
    """Decide after the end of a generation, and update the history.

    >>> resize = Ending(kind="resize", lifetime=9.0)
    >>> judge(resize, RestartHistory(), budget=0, count_resizes=False).sentence
    'a resize uses no restart'
    """
    history = _credit_progress(ending, _count_start_failures(ending, history))
    failure = ending.failure
    if failure is not None and failure.fatal:
        return RestartDecision(False, history, "a restart cannot help", incurable=True)
    if failure is not None and failure.incurable and _cannot_succeed(ending, history, failure):
        sentence = f"a restart cannot fix this {failure.kind}; giving up"
        return RestartDecision(False, history, sentence, incurable=True)
    if failure is not None and failure.incurable and ending.without:
        return RestartDecision(True, _note_failure(ending, history), "no restart used")
    if ending.kind == "error":
        return _judge_error(ending, history, budget)
    if ending.kind != "failure" and not count_resizes:
        return RestartDecision(True, history, f"a {ending.kind.replace('-', ' ')} uses no restart")
    history = _note_failure(ending, history)
    if failure is not None and history.repeats >= _limit(ending, history, failure):
        same = _same(failure, history.repeats)
        return RestartDecision(False, history, same, incurable=failure.told)
    if history.used >= budget:
        return RestartDecision(False, history, _spent(budget))
    history = replace(history, used=history.used + 1)
    return RestartDecision(True, history, _used(history, budget))


def pause(history: RestartHistory) -> float:
    """Seconds before the next generation begins.

    No pause at first: most failures are over when they are noticed. But if no world can form, for
    example because of a firewall between two nodes, generations fail within milliseconds: all
    restarts would be used long before anyone could fix it.

    >>> [pause(RestartHistory(in_vain=count)) for count in (0, 1, 2, 3, 4, 99)]
    [0.0, 0.0, 0.25, 0.5, 1.0, 30.0]
    """
    return backoff.pause(history.in_vain - 1, FIRST_PAUSE, LONGEST_PAUSE)


def why_pause(history: RestartHistory) -> str:
    """The sentence for users during the pause."""
    return (
        f"the last {history.in_vain} generations failed right after start, before their first "
        f"step; the next one starts in {pause(history):g} s"
    )


def _judge_error(ending: Ending, history: RestartHistory, budget: int) -> RestartDecision:
    """Judge an error of a worker that rolled back and is alive: retry the step, but only once."""
    assert ending.failure is not None, "an error needs a failure"
    signature = _signature(ending.failure)
    if signature == history.signature:
        sentence = f"same error again at step {ending.failure.step} after a rollback"
        return RestartDecision(False, history, f"{sentence}; giving up", incurable=True)
    if history.used >= budget:
        return RestartDecision(False, history, _spent(budget))
    history = replace(history, used=history.used + 1, repeats=1, signature=signature)
    return RestartDecision(True, history, _used(history, budget))


def _cannot_succeed(ending: Ending, history: RestartHistory, failure: Failure) -> bool:
    """Return whether the program has run on no node, and there is no other node to try."""
    again = history.signature == _signature(failure)
    return ending.everywhere or (not ending.trained and (again or not ending.without))


def _limit(ending: Ending, history: RestartHistory, failure: Failure) -> int:
    """The number of equal failures in a row that ends the job."""
    trained = ending.trained or history.best_step >= 0 or failure.step is not None
    at_start = ending.all_ranks and not trained and not failure.passing
    return SAME_START_LIMIT if at_start else SAME_FAILURE_LIMIT


def _same(failure: Failure, times: int) -> str:
    where = [failure.place, f"step {failure.step}" if failure.step is not None else ""]
    shown = ", ".join(filter(None, where))
    what = "error" if failure.told else "failure"
    return f"same {what} {times} times without progress{shown and f' ({shown})'}; giving up"


def _used(history: RestartHistory, budget: int) -> str:
    return f"{history.used} of {words.counted(budget, 'restart')} used"


def _spent(budget: int) -> str:
    if budget == 0:
        return "no restarts are allowed (--max-restarts 0)"
    spent = "the only restart is used" if budget == 1 else f"all {budget} restarts used"
    return f"{spent} (--max-restarts)"


def _credit_progress(ending: Ending, history: RestartHistory) -> RestartHistory:
    """Refill the budget when the generation got further than any before it."""
    if ending.step > history.best_step:
        return RestartHistory(best_step=ending.step)
    if _may_have_progressed(ending, history) and not _is_own_exception(ending.failure):
        return replace(history, used=0)
    return history


def _may_have_progressed(ending: Ending, history: RestartHistory) -> bool:
    """Return whether progress is unknown: the job reports no steps, and the generation ran for a
    while."""
    return history.best_step < 0 and ending.step < 0 and ending.lifetime >= PROGRESS_AFTER


def _count_start_failures(ending: Ending, history: RestartHistory) -> RestartHistory:
    """Count generations that failed right after start. A join, a leave or a node failure does not
    count, because the next world is another one; nor does a kill from outside, because it says
    nothing about the next generation."""
    if ending.lifetime >= START_FAILURE_TIME:
        return replace(history, in_vain=0)
    counts = ending.kind in ("failure", "error") and not is_from_outside(ending.failure)
    return replace(history, in_vain=history.in_vain + counts)


def is_from_outside(failure: Failure | None) -> bool:
    """Return whether a worker was killed from outside without an error of its own. An out-of-memory
    kill by the kernel does not count: it will happen again."""
    if failure is None or failure.told or failure.out_of_memory:
        return False
    return failure.exitcode in (-9, -15)


def _is_own_exception(failure: Failure | None) -> bool:
    """Return whether the script raised an exception that is not about a lost connection."""
    return failure is not None and failure.told and not root_cause.lost_connection(failure)


def _note_failure(ending: Ending, history: RestartHistory) -> RestartHistory:
    """Count repetitions of the same failure. A kill or a lost connection says nothing about the
    script, so the script's next failure is compared with the one before."""
    failure = ending.failure
    if failure is None or is_from_outside(failure) or root_cause.lost_connection(failure):
        return history
    if not failure.told and _may_have_progressed(ending, history):
        return replace(history, repeats=0, signature="")
    signature = _signature(failure)
    repeats = history.repeats + 1 if signature == history.signature else 1
    return replace(history, repeats=repeats, signature=signature)


def _signature(failure: Failure) -> str:
    return repr((*failure.signature(), failure.step))
