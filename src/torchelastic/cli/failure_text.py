"""Text about the last failure of a job: the first failure, and those that it caused."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from torchelastic.agent.output.terminal_text import one_line, plain
from torchelastic.events import words
from torchelastic.events.analysis.last_failure import FailureView
from torchelastic.events.failure import Failure

#: Maximum number of consequent failures to show.
_SHOWN = 8
#: Names of the main thread in our stacks, faulthandler's and py-spy's, in lower case.
_MAIN = ("main thread", "current thread", "mainthread")


def in_full(failure: FailureView, width: int) -> list[str]:
    """Describe the failure fully, wrapped to `width`; traceback and log lines are not wrapped."""
    cause = failure.cause
    lines = _wrapped(failure.sentence, width)
    for label, text in _facts(failure).items():
        if label != "hang" or text not in failure.sentence:
            lines += _wrapped(f"{label}: {text}", width)
    lines += [plain(line) for line in cause.traceback.rstrip().splitlines()]
    if cause.log_lines:
        lines += ["last lines of its output:", *(f"  {one_line(line)}" for line in cause.log_lines)]
    for heading, others in _others(failure).items():
        lines += [f"{heading}:", *_sentences(others, width)]
    return lines


def in_brief(failure: FailureView) -> list[str]:
    """Describe the failure in a few unwrapped lines."""
    lines = [failure.sentence]
    lines += [f"{label}: {text}" for label, text in _facts(failure).items()]
    if last_words := _innermost(failure.cause.traceback) or "\n".join(failure.cause.log_lines):
        lines.append(last_words.splitlines()[-1])
    for heading, others in _others(failure).items():
        names = [one.node if one.is_node else f"rank {one.rank}" for one in others]
        lines.append(f"{heading}: {words.listed(names)}")
    return [one_line(line) for line in lines]


def _innermost(traceback: str) -> str:
    """Return the last line of a traceback, or the top frame of a dumped stack."""
    lines = traceback.rstrip().splitlines()
    marks = ("most recent call first", '"MainThread"')
    threads = [at for at, line in enumerate(lines) if any(mark in line for mark in marks)]
    ours = [at for at in threads if any(mark in lines[at].lower() for mark in _MAIN)]
    for at in (ours or threads)[:1]:
        return "".join(lines[at + 1 : at + 2])
    return lines[-1] if lines else ""


def _facts(failure: FailureView) -> dict[str, str]:
    facts = {"hint": failure.cause.hint, "last collective": failure.cause.collective}
    if failure.hang is not None:
        facts["hang"] = str(failure.hang.get("text", ""))
    return {label: text for label, text in facts.items() if text}


def _others(failure: FailureView) -> dict[str, list[Failure]]:
    """Return the failures besides the first one, by heading."""
    others = failure.consequences
    sorted_ = {
        "also failed, independently": [one for one in others if one.by_itself],
        "failed because of it": [one for one in others if not one.by_itself],
    }
    return {heading: found for heading, found in sorted_.items() if found}


def _sentences(failures: Sequence[Failure], width: int) -> list[str]:
    lines = []
    for failure in failures[:_SHOWN]:
        lines += _wrapped(failure.sentence(), width, "  ")
    more = len(failures) - _SHOWN
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        one_line(text),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )
