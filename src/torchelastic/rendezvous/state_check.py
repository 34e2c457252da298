"""Judge whether all workers have the same state, by its hash. Pure.

Replicas of one state are equal to the bit after every step. A worker whose state differs computed
wrongly, or its memory changed, and its gradients have changed the state of all others since then.

    the hashes after a step               verdict
    all are equal                         the step is certified
    differ, and no step was certified     no more checks: these states are not meant to be equal
    more than half are equal              the other workers are wrong, and all go back
    differ between two workers            all go back; with fixed micro-batches the steps show,
                                          when they are taken again, which of the two was wrong
    differ without a majority             no more checks

All go back to the newest certified step of which a worker with a right state has a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchelastic.events import words

#: How often the job goes back to the same step; the next difference ends it.
DIFFERENCES_LIMIT = 3


class Checked(NamedTuple):
    """The state of a worker after `step` steps: its hash."""

    rank: int
    step: int
    digest: int
    #: The version of the certified state that the worker has a copy of, as the generation that
    #: wrote it and the step; (-1, -1): none.
    written: int = -1
    pinned: int = -1
    #: When steps were taken again: the first that gave another result than before; -1: none.
    odd: int = -1


class Rewind(NamedTuple):
    """The certified version that a job went back to: beyond it, the work of generations before
    `generation` is void."""

    generation: int
    written: int
    step: int
    #: How often in a row the job went back to this step.
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a check."""

    step: int
    #: Ranks whose states are wrong; empty if that is not known.
    wrong: tuple[int, ...] = ()
    #: The version to go back to.
    back: tuple[int, int] | None = None
    #: Why there are no more checks.
    ends: str = ""
    #: The rank that was wrong when states differed before; -1: none, or not known.
    blamed: int = -1

    @property
    def is_equal(self) -> bool:
        return self.back is None and not self.ends


def compare(said: Sequence[Checked]) -> Comparison:
    """Compare the hashes of all workers after the same step.

    >>> compare([Checked(0, 20, 7, 0, 10), Checked(1, 20, 8, 0, 10), Checked(2, 20, 7, 0, 10)])
    Comparison(step=20, wrong=(1,), back=(0, 10), ends='', blamed=-1)
    """
    step = said[0].step
    (digest, most), *others = Counter(one.digest for one in said).most_common()
    if not others:
        return Comparison(step=step, blamed=_first_odd(said))
    is_majority = 2 * most > len(said)
    trusted = [one for one in said if one.digest == digest or not is_majority]
    back = max((one.written, one.pinned) for one in trusted)
    what = f"the states of the workers differ after step {step}"
    if back[1] < 0:
        ends = f"{what}, at the first check: they are not replicas of one state, or one was wrong"
        return Comparison(step=step, ends=f"{ends} from the beginning")
    if not is_majority and len(said) > 2:
        return Comparison(step=step, ends=f"{what}, and no majority of them is equal")
    wrong = [one.rank for one in said if one.digest != digest] if is_majority else []
    return Comparison(step=step, wrong=tuple(sorted(wrong)), back=back)


def _first_odd(said: Sequence[Checked]) -> int:
    """The rank whose own results changed first when all took the same steps again: those of the
    others changed only after it had spoiled their states."""
    odd = sorted((one.odd, one.rank) for one in said if one.odd >= 0)
    is_alone = bool(odd) and (len(odd) == 1 or odd[0][0] < odd[1][0])
    return odd[0][1] if is_alone else -1


def sentence(verdict: Comparison, named: Sequence[str], size: int) -> str:
    """Say what a check found. `named`: the wrong ranks and their nodes, as `rank 1 on node-b`."""
    if verdict.ends:
        return f"{verdict.ends}; states are not compared any more"
    assert verdict.back is not None, "equal states need no sentence"
    again = f"training goes back to step {verdict.back[1]}, where all states were equal"
    if not named:
        return (
            f"the states of the two workers differ after step {verdict.step} (silent corruption); "
            f"which of them is wrong is not known yet: {again}"
        )
    right = words.counted(size - len(named), "other worker")
    verb = "differs" if len(named) == 1 else "differ"
    return (
        f"the state of {', '.join(named)} {verb} from that of the {right} after step "
        f"{verdict.step} (silent corruption): {again}"
    )
