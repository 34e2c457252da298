"""`torchelastic doctor`: find problems before a long run starts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic import env
from torchelastic.agent.output.terminal_text import one_line
from torchelastic.cli.commands import terminal
from torchelastic.cli.options import checks
from torchelastic.cli.options.command_defaults import DOCTOR
from torchelastic.cli.options.devices import gpus
from torchelastic.cli.options.flags import FLAGS
from torchelastic.cli.options.help import terminal_width
from torchelastic.cli.options.launch_config import entry_of, launch_config
from torchelastic.cli.options.parser import ARGUMENT, VARIABLE, Parsed, parse, set_variables
from torchelastic.config import Entry, LaunchConfig
from torchelastic.doctor.finding import Finding, Verdict, has_fault, not_checked, summary
from torchelastic.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_SIGNAL_BASE,
    EXIT_USAGE,
    ConfigError,
)

if TYPE_CHECKING:
    from torchelastic.doctor.checkup import Subject
    from torchelastic.doctor.gpu_jobs import Taken

_ROOT = Path("/")
#: Column widths; a few names of checks are slightly longer.
_VERDICT_WIDTH = max(len(verdict.value) for verdict in Verdict)
_CHECK_WIDTH = 15
_EXIT_CODES = """\
Each check is ok, a warning, a fault, or was not made. The exit code is 0 without a fault, 1 with
one, and 2 if the arguments are wrong or --gpu is given on a machine without a GPU."""


def main(argv: Sequence[str]) -> int:
    """Run the `doctor` command; return the exit code."""
    environ = env.snapshot()
    try:
        parsed = parse(argv, DOCTOR, environ)
    except ConfigError as error:
        return terminal.refuse("doctor", error)
    if parsed["help"]:
        print(_help(terminal_width()), end="")
        return EXIT_OK
    # Not on the console: the findings include what the agent would log.
    logging.getLogger("torchelastic").addHandler(logging.NullHandler())
    try:
        return _examine(parsed, environ)
    except BrokenPipeError:
        terminal.nobody_reads()
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_SIGNAL_BASE + signal.SIGINT


def _examine(parsed: Parsed, environ: Mapping[str, str]) -> int:
    # Imported here: help and usage errors must be fast.
    from torchelastic.doctor.checkup import examine

    subject = launch_of(parsed, environ)
    tell = _tell_json if parsed["json"] else _tell
    with _log_dir(subject.config.log_dir):
        findings = tell(subject, lambda: examine(subject), parsed["gpu"])
    if has_fault(findings):
        return EXIT_FAILED
    return EXIT_USAGE if parsed["gpu"] and not subject.gpus else EXIT_OK


def launch_of(parsed: Parsed, environ: Mapping[str, str]) -> Subject:
    """Return the planned launch, with every error that `run` would report."""
    from torchelastic.doctor.checkup import Subject

    refusals: list[str] = []

    def unless_refused(make: Callable[[], object]) -> object:
        try:
            return make()
        except ConfigError as error:
            refusals.append(str(error))
            return None

    config = unless_refused(lambda: launch_config(parsed, environ))
    entry = unless_refused(lambda: entry_of(parsed, DOCTOR.prog)) if parsed.command else None
    if isinstance(entry, Entry):
        unless_refused(lambda: checks.check_entry(entry, environ))
        unless_refused(lambda: checks.check_preload(parsed["preload"], entry))
    if isinstance(config, LaunchConfig):
        path = config.log_dir
        with _log_dir(path):
            unless_refused(lambda: checks.prepare_log_dir(path))
    set_now = list(set_variables(environ))
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


def _tell(subject: Subject, examine: Callable[[], list[Finding]], on_gpus: bool) -> list[Finding]:
    """Print findings as text; those of the GPUs one by one, because they take minutes."""
    from torchelastic.doctor.gpu_jobs import overall

    terminal.show(f"{title(subject)}\n")
    width, findings = terminal_width(), examine()
    terminal.show("\n".join(lines(findings, width)))
    taken = []
    for one in _on_gpus(subject, on_gpus):
        taken.append(one)
        terminal.show("\n".join(lines([one.finding], width)))
    found = [one.finding for one in taken]
    said = f"{overall(found)} " if taken else ""
    terminal.show(f"\n{said}{summary(findings + found)}")
    if file := _report(subject, findings, taken):
        terminal.show(f"Report written to {file}. Please attach it to an issue, good or bad.")
    return findings + found


def _tell_json(
    subject: Subject, examine: Callable[[], list[Finding]], on_gpus: bool
) -> list[Finding]:
    """Print findings as JSON."""
    from torchelastic import __version__

    examined, taken = examine(), list(_on_gpus(subject, on_gpus))
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


def _report(subject: Subject, findings: Sequence[Finding], taken: Sequence[Taken]) -> str:
    """Write the report; return its path, or an empty text if there is nothing to report."""
    from torchelastic import __version__
    from torchelastic.doctor import gpu_report

    if not subject.gpus or not taken:
        return ""
    return str(gpu_report.write(__version__, subject.environ, findings, taken))


def _on_gpus(subject: Subject, asked: bool) -> Iterator[Taken]:
    from torchelastic.doctor import gpu_jobs

    if asked and not subject.gpus:
        none = "This machine has no GPU: the GPU jobs were not run."
        yield gpu_jobs.Taken(not_checked("gpu", none))
    elif asked:
        for way in gpu_jobs.PATHS:
            yield gpu_jobs.take(way, "cuda", subject.gpus, subject.environ)


def _help(width: int) -> str:
    flags = "\n".join(
        textwrap.fill(
            flag.help, width, initial_indent=f"  {flag.name:8}", subsequent_indent=" " * 10
        )
        for flag in DOCTOR.own_flags
    )
    return "\n\n".join(
        [
            f"usage: {DOCTOR.prog} [--gpu] [--json] [flags of run] [SCRIPT [arguments]]",
            textwrap.fill(DOCTOR.about, width),
            flags,
            "Example: torchelastic doctor --nnodes 2 --rdzv-endpoint node1:29400 train.py",
            textwrap.fill(_EXIT_CODES, width) + "\n",
        ]
    )


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
