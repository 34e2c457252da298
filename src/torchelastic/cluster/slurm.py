"""Slurm: a step started by `srun`, one task per node. Pure.

Variables: srun(1), "OUTPUT ENVIRONMENT VARIABLES". A shell of `salloc`, `srun --pty` or the script
of `sbatch` runs on one node only and is not a step of the job's training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchelastic.cluster.platform import PlatformFacts, ReadFile, whole
from torchelastic.config import DEFAULT_PORT, format_endpoint

#: Steps with special meaning (batch script, interactive shell) have ids from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: slurm.conf's KillWait, which no variable tells: seconds from SIGTERM to SIGKILL.
KILL_WAIT = 30.0
#: More endpoints than this are not needed: the job starts with a majority of them.
MOST_ENDPOINTS = 3


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if not job or environ.get("SLURM_PTY_PORT"):
        return None
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return _outside_a_step(job, environ)
    tasks, nodes = whole(environ.get("SLURM_STEP_NUM_TASKS")), environ.get("SLURM_STEP_NODELIST")
    restarts = environ.get("SLURM_RESTART_COUNT") or "0"
    # A script may run several steps one after the other, each a job of ours.
    is_first = int(step) == 0
    return PlatformFacts(
        platform="Slurm",
        job=f"job {job}",
        run_id=job if is_first else f"{job}.{step}",
        min_nodes=tasks,
        max_nodes=tasks,
        endpoints=endpoints(hosts(nodes or ""), DEFAULT_PORT),
        node=f"{job}.{step}-{restarts}-{environ.get('SLURM_PROCID', '')}",
        leave_signals=("SIGTERM", "SIGUSR1"),
        signals_all=True,
        grace=KILL_WAIT,
        sources={
            "run_id": "SLURM_JOB_ID" if is_first else "SLURM_JOB_ID, SLURM_STEP_ID",
            "max_nodes": "SLURM_STEP_NUM_TASKS",
            "endpoints": "SLURM_STEP_NODELIST",
            "node": "SLURM_JOB_ID, SLURM_RESTART_COUNT, SLURM_PROCID",
        },
    )


def _outside_a_step(job: str, environ: Mapping[str, str]) -> PlatformFacts | None:
    nodes = whole(environ.get("SLURM_JOB_NUM_NODES")) or 1
    if nodes == 1:
        return None
    advice = (
        f"Slurm job {job} has {nodes} nodes, but this process was started without srun and uses "
        "only its own: write `srun --ntasks-per-node=1 torchelastic run ...` to use all."
    )
    return PlatformFacts(platform="Slurm", job=f"job {job}", leave_signals=(), advice=advice)


def endpoints(names: list[str], port: int) -> tuple[str, ...]:
    """Return the endpoints of a job on these hosts.

    Three, so that the job also starts while one of their hosts is down. Two would both have to be
    up.

    >>> endpoints(["a", "b"], 1), endpoints(["a", "b", "c", "d"], 1)
    (('a:1',), ('a:1', 'b:1', 'c:1'))
    """
    chosen = names[:MOST_ENDPOINTS] if len(names) >= MOST_ENDPOINTS else names[:1]
    return tuple(format_endpoint(name, port) for name in chosen)


def hosts(nodelist: str) -> list[str]:
    """Return the hosts of a node list, in its order.

    >>> hosts("n[001-003,007],m5")
    ['n001', 'n002', 'n003', 'n007', 'm5']
    """
    found: list[str] = []
    for item in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", nodelist):
        found += _expand(item)
    return found


def _expand(item: str) -> list[str]:
    """Expand the brackets of one item, of which there may be several."""
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inside, _, after = rest.partition("]")
    return [before + number + end for number in _numbers(inside) for end in _expand(after)]


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of `001-003,007`, which keep their width."""
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        count = range(int(first), int(last or first) + 1)
        found += [str(number).zfill(len(first)) for number in count]
    return found
