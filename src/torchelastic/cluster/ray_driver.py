"""The driver of a Ray job (`ray job submit -- …`). Pure.

Variables: ray 2.60, dashboard/modules/job/job_supervisor.py. A driver runs on one node of the
cluster; `torchelastic submit ray` is what uses the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from torchelastic.cluster.platform import PlatformFacts, ReadFile

#: The name of the variable itself ends like that.
VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    try:
        metadata = json.loads(environ.get(VARIABLE, "")).get("metadata") or {}
    except (ValueError, AttributeError):
        return None
    return PlatformFacts(
        platform="Ray",
        job=f"job {metadata.get('job_submission_id', '')}".rstrip(),
        leave_signals=(),
        advice="This Ray job trains on the node of its driver only. To use the nodes of the "
        "cluster, run `torchelastic submit ray` instead of `torchelastic run`.",
    )
