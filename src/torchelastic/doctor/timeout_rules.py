"""Times and numbers of a launch that contradict each other: a table of rules. Pure.

What a script says itself, such as the time-outs of its process groups, cannot be seen from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchelastic.config import ETCD_BACKENDS, OWN_ETCD, LaunchConfig, parse_endpoints
from torchelastic.doctor.finding import Finding, ok, warning
from torchelastic.rendezvous.etcd.settings import EtcdSettings

#: Seconds: a busy machine stands still for longer than less.
SHORTEST_LEASE = 1.0
#: Seconds that a scheduler takes at least to start a node anew.
NODE_COMES_BACK = 60.0
#: Seconds between SIGTERM and SIGKILL of Kubernetes and of Slurm, unless they are told otherwise.
CLUSTER_GRACE = 30.0
#: Seconds after which agents end without etcd: `etcd_store.RECONNECT_TIMEOUT`, which is not pure.
ETCD_RECONNECT = 60.0


@dataclass(frozen=True)
class Rule:
    """A contradiction: when it is there, what it does and what to do."""

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
        "With --lease {config.lease:g} a node that is merely busy counts as failed.",
        "Leave it at 3, or write 1 at least: a node that dies is noticed at once anyway.",
    ),
    Rule(
        "times",
        lambda config, _: (
            config.max_nodes > 1 and 0 < (config.progress_timeout or 0) <= config.lease
        ),
        "--progress-timeout {config.progress_timeout:g} is over before --lease {config.lease:g}: "
        "when one node falls silent, the workers of the others count as hanging first and are "
        "killed.",
        "Make --progress-timeout several times --lease.",
    ),
    Rule(
        "times",
        lambda config, _: 0 < config.wait_for_nodes < NODE_COMES_BACK and config.max_nodes > 1,
        "With --wait-for-nodes {config.wait_for_nodes:g} the job ends when a node that it needs "
        "is away for longer, and few come back so soon.",
        "Leave it at 3600, or give as long as your scheduler takes to replace a node.",
    ),
    Rule(
        "times",
        lambda config, _: _outage(config) > ETCD_RECONNECT,
        "etcd_outage is longer than the 60 s after which agents end without etcd.",
        "Write etcd_outage=60 or less.",
    ),
    Rule(
        "times",
        lambda config, environ: _cluster(environ) and config.shutdown_timeout > CLUSTER_GRACE,
        "Workers are given {config.shutdown_timeout:g} s after SIGTERM, and Kubernetes and Slurm "
        "kill after 30 s unless they are told otherwise.",
        "Raise terminationGracePeriodSeconds (Slurm: KillWait) above --shutdown-timeout.",
    ),
    Rule(
        "shape",
        lambda config, _: _allows_no_world(config),
        "With {config.nproc_per_node} worker(s) on each of {config.min_nodes} to "
        "{config.max_nodes} node(s), --world-sizes {config.world_sizes} allows no world.",
        "Change one of the three, unless the other nodes have more or fewer workers.",
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
        "Of two nodes only the host of the rendezvous can go on alone: if it is lost, the job "
        "waits.",
        "Give --witness a directory that both nodes share, such as where checkpoints are; or use "
        "etcd or a third node.",
    ),
    Rule(
        "shape",
        lambda config, _: _endpoints(config) == 2,
        "Of two endpoints both must be there when the job begins, as a majority is needed.",
        "Give one of them, or three.",
    ),
    Rule(
        "shape",
        lambda config, _: config.snapshot_replicas > max(config.max_nodes - 1, 1),
        "--snapshot-replicas {config.snapshot_replicas} asks for copies on more nodes than the "
        "job can have besides this one.",
        "Lower it, or raise --nnodes.",
    ),
    Rule(
        "shape",
        lambda config, environ: (
            config.max_nodes == 1 and int(_digits(environ.get("SLURM_JOB_NUM_NODES"))) > 1
        ),
        "Slurm has given this job {environ[SLURM_JOB_NUM_NODES]} nodes, and --nnodes says 1: each "
        "would train alone.",
        "Say --nnodes and --rdzv-endpoint.",
    ),
)


def contradictions(config: LaunchConfig, environ: Mapping[str, str]) -> list[Finding]:
    """One warning for each rule that holds."""
    found = [
        warning(rule.check, rule.found.format(config=config, environ=environ), rule.advice)
        for rule in RULES
        if rule.holds(config, environ)
    ]
    if any(finding.check == "times" for finding in found):
        return found
    return [ok("times", "No time-out of the launch contradicts another."), *found]


def _digits(text: str | None) -> str:
    return text if text and text.isdigit() else "0"
