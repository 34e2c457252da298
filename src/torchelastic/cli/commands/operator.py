"""`torchelastic operator`: run the controller of ElasticJobs."""

from __future__ import annotations

import contextlib

from torchelastic.cli.options.parser import Parsed
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.operator.job_controller import JobController


def main(parsed: Parsed) -> int:
    """Act until a signal; return the exit code."""
    with contextlib.closing(ClusterApi()) as api:
        return JobController(api).run()
