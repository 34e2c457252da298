"""A replica of a job that TorchX submitted with the component `torchelastic.torchx:elastic`. Pure.

Variables: torchx 0.7.0, torchx/runner/api.py (TORCHX_JOB_ID) and torchx/schedulers/*.py (the one
with the host of replica 0, whose name each scheduler chooses); the others are the component's.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchelastic.cluster.platform import PlatformFacts, ReadFile, pod_grace
from torchelastic.config import format_endpoint

#: `NAME:PORT`: the variable with the host of replica 0, and the port to meet at.
ENDPOINT = "TORCHELASTIC_TORCHX_ENDPOINT"
REPLICA = "TORCHELASTIC_TORCHX_REPLICA"
HANDLE = "TORCHX_JOB_ID"

#: Schedulers whose replicas all run on this machine, and those that start every replica in the
#: directory of `torchx run`, which the replicas share.
LOCAL = ("local", "local_cwd")
SHARED = (*LOCAL, "slurm", "lsf")
#: Schedulers that signal every process of a replica, not only its agent.
SIGNAL_ALL = ("slurm", "lsf")


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    handle, endpoint = environ.get(HANDLE, ""), environ.get(ENDPOINT, "")
    if not handle or not endpoint:
        return None
    scheduler, run_id = handle.partition("://")[0], handle.rpartition("/")[2]
    variable, _, port = endpoint.rpartition(":")
    host, source = _first(environ, variable, scheduler)
    return PlatformFacts(
        platform="TorchX",
        job=handle,
        run_id=run_id,
        endpoints=(format_endpoint(host, int(port)),) if host else (),
        signals_all=scheduler in SIGNAL_ALL,
        grace=None if scheduler in LOCAL else pod_grace(environ),
        job_dir=f"torchelastic-jobs/{run_id}" if scheduler in SHARED else "",
        sources={"run_id": HANDLE, "endpoints": source},
    )


def _first(environ: Mapping[str, str], variable: str, scheduler: str) -> tuple[str, str]:
    """Return the host of replica 0 and the variable that names it; empty: unknown."""
    host = environ.get(variable, "").partition(",")[0]
    if host in ("", "localhost") and scheduler not in LOCAL:
        # Some schedulers do not tell replica 0 its own name, or call it localhost, where other
        # machines cannot reach it.
        is_first = environ.get(REPLICA) == "0"
        return (environ.get("HOSTNAME", ""), "HOSTNAME") if is_first else ("", "")
    return host, variable
