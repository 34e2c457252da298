"""Variables that were set and forgotten, contradict the launch or do harm. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from torchelastic.config import LaunchConfig
from torchelastic.doctor.finding import Finding, fault, ok, warning

#: Set for workers by the agent; whoever sets them before means another launcher.
_OTHER_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "NODE_RANK")
#: With 0, a collective of NCCL that fails or times out is told to nobody.
_NCCL_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_FAULTS = "TORCHELASTIC_FAULTS"
#: What a script must not hide from its workers.
_OURS = ("torch", "torchelastic")


def variables(
    environ: Mapping[str, str],
    config: LaunchConfig,
    used: Sequence[str],
    overridden: Sequence[str],
    known: Collection[str],
) -> list[Finding]:
    """`used` are the variables that set a flag, `overridden` those whose flag was given as well,
    `known` all that a flag has."""
    found = [
        *_forgotten(environ, overridden, known),
        *_other_launcher(environ, config),
        *_harm(environ),
    ]
    if found:
        return found
    if used:
        return [ok("variables", f"Flags have values from {', '.join(used)}.")]
    return [ok("variables", "None contradicts the launch.")]


def _forgotten(
    environ: Mapping[str, str], overridden: Sequence[str], known: Collection[str]
) -> list[Finding]:
    found = []
    unknown = sorted(name for name in environ if name.startswith("PET_") and name not in known)
    if unknown:
        found.append(
            warning(
                "variables",
                f"No flag reads {', '.join(unknown)}.",
                "Correct the name (PET_NNODES is for --nnodes), or unset it.",
            )
        )
    if overridden:
        found.append(
            warning(
                "variables",
                f"The command line contradicts {', '.join(overridden)}, and wins.",
                "Unset it, or leave the flag out.",
            )
        )
    return found


def _other_launcher(environ: Mapping[str, str], config: LaunchConfig) -> list[Finding]:
    """With a place to meet, scripts commonly set these to write that place down."""
    there = [name for name in _OTHER_LAUNCHERS if environ.get(name)]
    if not there or config.rdzv_endpoint:
        return []
    return [
        warning(
            "variables",
            f"Nobody reads {', '.join(there)}: this job has one node, and its workers get values "
            "of their own.",
            "If there are to be more nodes, say --nnodes and --rdzv-endpoint.",
        )
    ]


def _harm(environ: Mapping[str, str]) -> list[Finding]:
    found = []
    if environ.get(_FAULTS):
        found.append(
            warning(
                "variables",
                f"{_FAULTS}={environ[_FAULTS]} makes workers fail on purpose.",
                "Unset it unless this is a test.",
            )
        )
    silent = [name for name in _NCCL_ERRORS if environ.get(name) == "0"]
    if silent:
        found.append(
            warning(
                "variables",
                f"{silent[0]}=0: a collective of NCCL that times out hangs its worker, and "
                "nobody is told.",
                "Unset it.",
            )
        )
    return found


def shadows(beside: Collection[str], directory: str) -> list[Finding]:
    """What the modules and packages `beside` the script hide from it."""
    ours = sorted(name for name in beside if name in _OURS)
    standard = sorted(name for name in beside if name in sys.stdlib_module_names)
    found = []
    if ours:
        found.append(
            fault(
                "script",
                f"{', '.join(ours)} in {directory} hides the package of that name from workers.",
                "Rename it.",
            )
        )
    if standard:
        found.append(
            warning(
                "script",
                f"{', '.join(standard)} in {directory} has the name of a module of Python's, and "
                "is imported instead of it.",
                "Rename it.",
            )
        )
    return found
