"""`torchelastic delete`: end a job on Kubernetes and remove it."""

from __future__ import annotations

from torchelastic.cli.options.parser import Parsed
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.kubernetes.job_control import JobControl
from torchelastic.errors import EXIT_OK


def main(parsed: Parsed) -> int:
    """Delete a job; return the exit code."""
    control = JobControl(ClusterApi())
    handle = control.find(parsed.argument)
    control.delete(handle)
    print(f"Deleted {handle}.")
    return EXIT_OK
