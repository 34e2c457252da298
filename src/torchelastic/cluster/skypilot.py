"""A SkyPilot task. Pure.

Variables: skypilot 2026-08-22, docs "Environment variables" (distributed jobs). A machine that is
preempted gets no signal: its node is lost without notice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchelastic.cluster.platform import PlatformFacts, ReadFile, whole
from torchelastic.config import DEFAULT_PORT, format_endpoint


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    nodes, task = whole(environ.get("SKYPILOT_NUM_NODES")), environ.get("SKYPILOT_TASK_ID", "")
    if not addresses or nodes is None or not task:
        return None
    return PlatformFacts(
        platform="SkyPilot",
        job=f"task {task}",
        run_id=task,
        min_nodes=nodes,
        max_nodes=nodes,
        endpoints=(format_endpoint(addresses[0], DEFAULT_PORT),),
        leave_signals=(),
        sources={
            "run_id": "SKYPILOT_TASK_ID",
            "max_nodes": "SKYPILOT_NUM_NODES",
            "endpoints": "SKYPILOT_NODE_IPS",
        },
    )
