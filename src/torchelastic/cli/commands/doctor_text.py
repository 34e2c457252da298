"""The findings of `torchelastic doctor` as text. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from torchelastic.agent.output.terminal_text import one_line
from torchelastic.doctor.checkup import Subject
from torchelastic.doctor.finding import Finding, Verdict

_VERDICT = max(len(verdict.value) for verdict in Verdict)
#: Column width; a few names of checks are slightly longer.
_CHECK = 15


def title(subject: Subject) -> str:
    """Describe what is checked, in one line."""
    config = subject.config
    if subject.alone and subject.refusals:
        return "Checking this machine only: the launch is not valid."
    if subject.alone:
        return "Checking this machine. Add a script and its flags to check that launch as well."
    nodes = f"{config.min_nodes} to {config.max_nodes} nodes"
    if config.min_nodes == config.max_nodes:
        nodes = "1 node" if config.max_nodes == 1 else f"{config.max_nodes} nodes"
    what = "a launch" if subject.entry is None else subject.entry.name
    where = f", rendezvous at {config.rdzv_endpoint}" if config.rdzv_endpoint else ""
    return one_line(
        f"Checking {what} on {nodes} with --nproc-per-node {config.nproc_per_node}{where}."
    )


def lines(findings: Sequence[Finding], width: int) -> list[str]:
    """Format each finding as a paragraph, with its advice on a separate line."""
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
