"""`torchelastic scale`: change the number of nodes of a job on Kubernetes."""

from __future__ import annotations

from torchelastic.cli.options import values
from torchelastic.cli.options.parser import Parsed
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.kubernetes.job_control import JobControl
from torchelastic.errors import EXIT_OK, ConfigError


def main(parsed: Parsed) -> int:
    """Scale a job; return the exit code."""
    if len(parsed.command) < 2:
        raise ConfigError(f"Write a job and a number of nodes: {parsed.prog} JOB N.")
    job, number = parsed.command
    control = JobControl(ClusterApi())
    handle, nodes = control.find(job), values.whole(number)
    before = control.scale(handle, nodes)
    print(f"Scaled {handle} from {before} to {nodes} nodes.")
    return EXIT_OK
