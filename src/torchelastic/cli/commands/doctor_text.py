"""The findings of `torchelastic doctor` for people. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from torchelastic.agent.output.terminal_text import one_line
from torchelastic.doctor.checkup import Subject
from torchelastic.doctor.finding import Finding, Verdict

_VERDICT = max(len(verdict.value) for verdict in Verdict)
#: The longest name of a check is not much longer.
_CHECK = 15


def title(subject: Subject) -> str:
    """What is examined, in one line."""
    config = subject.config
    if subject.alone and subject.refusals:
        return "This machine; there is no launch that could be checked."
    if subject.alone:
        return "This machine; name a script and the flags of its launch to check that as well."
    nodes = f"{config.min_nodes} to {config.max_nodes} nodes"
    if config.min_nodes == config.max_nodes:
        nodes = "1 node" if config.max_nodes == 1 else f"{config.max_nodes} nodes"
    what = "A launch" if subject.entry is None else subject.entry.name
    where = f", meeting at {config.rdzv_endpoint}" if config.rdzv_endpoint else ""
    return one_line(f"{what} on {nodes} with --nproc-per-node {config.nproc_per_node}{where}.")


def lines(findings: Sequence[Finding], width: int) -> list[str]:
    """One paragraph each; what is to be done follows on a line of its own."""
    return [line for finding in findings for line in _lines(finding, width)]


def _lines(finding: Finding, width: int) -> list[str]:
    head = f"  {finding.verdict.value:{_VERDICT}}  {finding.check:{_CHECK}}  "
    margin = " " * len(head)
    found = _wrap(one_line(finding.found), width, head, margin)
    advice = _wrap(one_line(finding.advice), width, f"{margin}-> ", f"{margin}   ")
    return found + (advice if finding.advice else [])


def _wrap(text: str, width: int, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )
