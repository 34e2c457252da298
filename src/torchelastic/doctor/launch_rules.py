"""Verdicts on the launch: settings that contradict each other, and environment variables that are
left over, contradict the launch or do harm. Pure.

Settings inside the script, such as the timeouts of its process groups, are not visible here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torchelastic.config import ETCD_BACKENDS, OWN_ETCD, LaunchConfig, parse_endpoints
from torchelastic.doctor.finding import Finding, fault, ok, warning
from torchelastic.rendezvous.etcd.settings import EtcdSettings

#: Seconds: a busy machine may not respond for this long.
SHORTEST_LEASE = 1.0
#: Seconds that a scheduler needs at least to replace a node.
NODE_COMES_BACK = 60.0
#: Default seconds between SIGTERM and SIGKILL in Kubernetes and Slurm.
CLUSTER_GRACE = 30.0
#: Seconds after which agents end without etcd: `etcd_store.RECONNECT_TIMEOUT`, which is not pure.
ETCD_RECONNECT = 60.0


@dataclass(frozen=True)
class Rule:
    """A contradiction: its condition, its effect, and what to do."""

    check: str
    holds: Callable[[LaunchConfig, Mapping[str, str]], bool]
    found: str
    advice: str


def _has_etcd(config: LaunchConfig) -> bool:
    return config.rdzv_backend in ETCD_BACKENDS and config.rdzv_endpoint != OWN_ETCD


def _is_embedded(config: LaunchConfig) -> bool:
    return bool(config.rdzv_endpoint) and config.rdzv_backend not in ETCD_BACKENDS


def _endpoints(config: LaunchConfig) -> int:
    return len(parse_endpoints(config.rdzv_endpoint)) if _is_embedded(config) else 0


def _outage(config: LaunchConfig) -> float:
    return EtcdSettings.of(config.rdzv_configs).outage if _has_etcd(config) else 0.0


def _allows_no_world(config: LaunchConfig) -> bool:
    each = config.nproc_per_node
    counts = range(config.min_nodes, config.max_nodes + 1)
    return not any(config.world_sizes.allows(nodes * each) for nodes in counts)


def _cluster(environ: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environ or "SLURM_JOB_ID" in environ


RULES: tuple[Rule, ...] = (
    Rule(
        "times",
        lambda config, _: config.max_nodes > 1 and config.lease < SHORTEST_LEASE,
        "--lease {config.lease:g} is too short: a busy node would count as failed.",
        f"Use the default {LaunchConfig.lease:g}, or at least {SHORTEST_LEASE:g}; a node that dies "
        "is noticed at once anyway.",
    ),
    Rule(
        "times",
        lambda config, _: (
            config.max_nodes > 1 and 0 < (config.progress_timeout or 0) <= config.lease
        ),
        "--progress-timeout {config.progress_timeout:g} is not longer than --lease "
        "{config.lease:g}: when a node goes silent, the workers of the other nodes would be killed "
        "as hung.",
        "Make --progress-timeout several times --lease.",
    ),
    Rule(
        "times",
        lambda config, _: 0 < config.wait_for_nodes < NODE_COMES_BACK and config.max_nodes > 1,
        "--wait-for-nodes {config.wait_for_nodes:g} is short: the job ends if a required node is "
        "away for longer, and few nodes come back so soon.",
        f"Use the default {LaunchConfig.wait_for_nodes:g}, or the time your scheduler takes to "
        "replace a node.",
    ),
    Rule(
        "times",
        lambda config, _: _outage(config) > ETCD_RECONNECT,
        "etcd_outage is longer than the 60 s after which agents end without etcd.",
        "Set etcd_outage=60 or less.",
    ),
    Rule(
        "times",
        lambda config, environ: _cluster(environ) and config.shutdown_timeout > CLUSTER_GRACE,
        "Workers have {config.shutdown_timeout:g} s after SIGTERM, but Kubernetes and Slurm kill "
        "after 30 s by default.",
        "Raise terminationGracePeriodSeconds (Slurm: KillWait) above --shutdown-timeout.",
    ),
    Rule(
        "shape",
        lambda config, _: _allows_no_world(config),
        "With {config.nproc_per_node} worker(s) on each of {config.min_nodes} to "
        "{config.max_nodes} node(s), --world-sizes {config.world_sizes} allows no world.",
        "Change one of the three, unless other nodes have more or fewer workers.",
    ),
    Rule(
        "shape",
        lambda config, _: (
            _is_embedded(config)
            and (config.min_nodes, config.max_nodes) == (1, 2)
            and config.quorum == "majority"
            and not config.two_node_takeover
            and not config.witness
        ),
        "With two nodes only the rendezvous host can continue alone: if it is lost, the job waits.",
        "Set --witness to a directory that both nodes share, for example where checkpoints are; "
        "or use etcd or a third node.",
    ),
    Rule(
        "shape",
        lambda config, _: _endpoints(config) == 2,
        "With two endpoints both must be up when the job starts, because a majority is needed.",
        "Use one endpoint, or three.",
    ),
    Rule(
        "shape",
        lambda config, _: config.snapshot_replicas > max(config.max_nodes - 1, 1),
        "--snapshot-replicas {config.snapshot_replicas} needs more other nodes than the job can "
        "have.",
        "Lower it, or raise --nnodes.",
    ),
    Rule(
        "shape",
        lambda config, environ: (
            config.max_nodes == 1 and int(_digits(environ.get("SLURM_JOB_NUM_NODES"))) > 1
        ),
        "Slurm allocated {environ[SLURM_JOB_NUM_NODES]} nodes, but --nnodes is 1: each node would "
        "train alone.",
        "Set --nnodes and --rdzv-endpoint.",
    ),
)


def contradictions(config: LaunchConfig, environ: Mapping[str, str]) -> list[Finding]:
    """Return a warning for each rule that holds."""
    found = [
        warning(rule.check, rule.found.format(config=config, environ=environ), rule.advice)
        for rule in RULES
        if rule.holds(config, environ)
    ]
    if any(finding.check == "times" for finding in found):
        return found
    return [ok("times", "The timeouts of the launch fit together."), *found]


def _digits(text: str | None) -> str:
    return text if text and text.isdigit() else "0"


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
