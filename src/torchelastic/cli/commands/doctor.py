"""`torchelastic doctor`: find problems before a long run starts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from torchelastic import __version__, env
from torchelastic.agent.output.terminal_text import one_line
from torchelastic.cli import checks, terminal
from torchelastic.cli.command_table import DOCTOR
from torchelastic.cli.flags import FLAGS
from torchelastic.cli.help import terminal_width
from torchelastic.cli.parser import ARGUMENT, VARIABLE, Parsed, set_variables
from torchelastic.cli.planned_job import entry_of, launch_config, read_file
from torchelastic.cluster.detect import detect
from torchelastic.config import Entry, LaunchConfig
from torchelastic.doctor import gpu_jobs
from torchelastic.doctor.checkup import Subject, examine
from torchelastic.doctor.finding import Finding, Severity, has_fault, not_checked, summary
from torchelastic.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError
from torchelastic.system.devices import gpus

_ROOT = Path("/")
#: Column widths; a few names of checks are slightly longer.
_VERDICT_WIDTH = max(len(verdict.value) for verdict in Severity)
_CHECK_WIDTH = 15


def main(parsed: Parsed) -> int:
    """Run the `doctor` command; return the exit code."""
    # Not on the console: the findings include what the agent would log.
    logging.getLogger("torchelastic").addHandler(logging.NullHandler())
    try:
        return _examine(parsed, env.snapshot())
    except BrokenPipeError:
        terminal.discard_output()
        return EXIT_FAILED


def _examine(parsed: Parsed, environ: Mapping[str, str]) -> int:
    subject = launch_of(parsed, environ)
    tell = _tell_json if parsed["json"] else _tell
    with _log_dir(subject.config.log_dir):
        findings = tell(subject, parsed["gpu"])
    if has_fault(findings):
        return EXIT_FAILED
    return EXIT_USAGE if parsed["gpu"] and not subject.gpus else EXIT_OK


def launch_of(parsed: Parsed, environ: Mapping[str, str]) -> Subject:
    """Return the planned launch, with every error that `run` would report."""
    refusals: list[str] = []

    def unless_refused(make: Callable[[], object]) -> object:
        try:
            return make()
        except ConfigError as error:
            refusals.append(str(error))
            return None

    config = unless_refused(
        lambda: launch_config(parsed, environ, found=detect(environ, read_file))
    )
    entry = unless_refused(lambda: entry_of(parsed)) if parsed.command else None
    if isinstance(entry, Entry):
        unless_refused(lambda: checks.check_entry(entry, environ))
        unless_refused(lambda: checks.check_preload(parsed["preload"], entry))
    if isinstance(config, LaunchConfig):
        path = config.log_dir
        with _log_dir(path):
            unless_refused(lambda: checks.prepare_log_dir(path))
    set_now = list(set_variables(FLAGS, environ))
    return Subject(
        config=config if isinstance(config, LaunchConfig) else LaunchConfig(),
        entry=entry if isinstance(entry, Entry) else None,
        environ=environ,
        gpus=gpus(environ, _ROOT),
        refusals=refusals,
        used=[name for flag, name in set_now if parsed.strength[flag.dest] == VARIABLE],
        overridden=[
            name
            for flag, name in set_now
            if parsed.strength[flag.dest] == ARGUMENT
            and flag.convert(environ[name]) != parsed[flag.dest]
        ],
        known=[name for flag in FLAGS for name in flag.variables],
        alone=not isinstance(config, LaunchConfig) or _is_silent(parsed),
    )


def _is_silent(parsed: Parsed) -> bool:
    """Return True if the arguments do not describe a launch."""
    own = {flag.dest for flag in DOCTOR.own_flags}
    return not parsed.command and not any(parsed.given(dest) for dest in set(parsed.values) - own)


@contextlib.contextmanager
def _log_dir(path: str | None) -> Iterator[None]:
    """Create the log directory for the checks if possible, and remove it afterwards."""
    there = Path(path).absolute() if path and path != os.devnull else None
    missing = [] if there is None else [p for p in (there, *there.parents) if not p.exists()]
    if missing:
        with contextlib.suppress(OSError):  # `prepare_log_dir` reports it
            os.makedirs(missing[0], exist_ok=True)
    try:
        yield
    finally:
        for made in missing:
            with contextlib.suppress(OSError):  # not created, or in use by now
                os.rmdir(made)


def _tell(subject: Subject, on_gpus: bool) -> list[Finding]:
    """Print findings as text; those of the GPUs one by one, because they take minutes."""
    terminal.show(f"{title(subject)}\n")
    width, findings = terminal_width(), examine(subject)
    terminal.show("\n".join(lines(findings, width)))
    taken = []
    for one in _on_gpus(subject, on_gpus):
        taken.append(one)
        terminal.show("\n".join(lines([one.finding], width)))
    found = [one.finding for one in taken]
    verdict = f"{gpu_jobs.overall(found)} " if taken else ""
    terminal.show(f"\n{verdict}{summary(findings + found)}")
    if file := _report(subject, findings, taken):
        terminal.show(f"Report written to {file}. Please attach it to an issue, good or bad.")
    return findings + found


def _tell_json(subject: Subject, on_gpus: bool) -> list[Finding]:
    """Print findings as JSON."""
    examined, taken = examine(subject), list(_on_gpus(subject, on_gpus))
    findings = [*examined, *(one.finding for one in taken)]
    picture = {
        "torchelastic": __version__,
        "fault": has_fault(findings),
        "findings": [finding.to_json() for finding in findings],
    }
    if file := _report(subject, examined, taken):
        picture["report"] = file
    terminal.show(json.dumps(picture, indent=2))
    return findings


def _report(
    subject: Subject, findings: Sequence[Finding], taken: Sequence[gpu_jobs.PathResult]
) -> str:
    """Write the report; return its path, or an empty text if there is nothing to report."""
    if not subject.gpus or not taken:
        return ""
    return str(gpu_jobs.write_report(__version__, subject.environ, findings, taken))


def _on_gpus(subject: Subject, asked: bool) -> Iterator[gpu_jobs.PathResult]:
    if asked and not subject.gpus:
        none = "This machine has no GPU: the GPU jobs were not run."
        yield gpu_jobs.PathResult(not_checked("gpu", none))
    elif asked:
        for way in gpu_jobs.PATHS:
            yield gpu_jobs.take(way, "cuda", subject.gpus, subject.environ)


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
    head = f"  {finding.verdict.value:{_VERDICT_WIDTH}}  {finding.check:{_CHECK_WIDTH}}  "
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
