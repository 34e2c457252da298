"""Environment variables that are left over, contradict the launch or do harm. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from torchelastic.config import LaunchConfig
from torchelastic.doctor.finding import Finding, fault, ok, warning

#: The agent sets these for workers; if set before, they are meant for another launcher.
_OTHER_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "NODE_RANK")
#: With 0, NCCL does not report a collective that fails or times out.
_NCCL_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_FAULTS = "TORCHELASTIC_FAULTS"
#: Packages that files next to the script must not hide.
_OURS = ("torch", "torchelastic")


def variables(
    environ: Mapping[str, str],
    config: LaunchConfig,
    used: Sequence[str],
    overridden: Sequence[str],
    known: Collection[str],
) -> list[Finding]:
    """Check the variables: `used` set a flag, `overridden` lost to a flag on the command line,
    `known` belong to any flag."""
    found = [
        *_forgotten(environ, overridden, known),
        *_other_launcher(environ, config),
        *_harm(environ),
    ]
    if found:
        return found
    if used:
        return [ok("variables", f"Flags are set by {', '.join(used)}.")]
    return [ok("variables", "No variable contradicts the launch.")]


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
                f"The command line overrides {', '.join(overridden)}.",
                "Unset it, or leave the flag out.",
            )
        )
    return found


def _other_launcher(environ: Mapping[str, str], config: LaunchConfig) -> list[Finding]:
    """Find variables of another launcher. With an endpoint, scripts commonly use them to set it."""
    there = [name for name in _OTHER_LAUNCHERS if environ.get(name)]
    if not there or config.rdzv_endpoint:
        return []
    return [
        warning(
            "variables",
            f"{', '.join(there)} will be ignored: this job has one node, and the agent sets "
            "these for its workers.",
            "For more nodes, set --nnodes and --rdzv-endpoint.",
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
                f"{silent[0]}=0: a worker hangs without an error when an NCCL collective times "
                "out.",
                "Unset it.",
            )
        )
    return found


def shadows(beside: Collection[str], directory: str) -> list[Finding]:
    """Find modules that those `beside` the script hide."""
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
                f"{', '.join(standard)} in {directory} hides the standard library module of that "
                "name.",
                "Rename it.",
            )
        )
    return found
