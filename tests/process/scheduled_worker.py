"""A `chaos_worker` of a job on Slurm or Kubernetes: every start has a record and ledger of its own.

scheduled_worker.py MODE DIRECTORY [key=value ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

mode, directory, *keys = sys.argv[1:]
start = os.environ.get("SLURM_RESTART_COUNT", "0")
record, ledger = (Path(directory, name, start) for name in ("record", "ledger"))
for path in (record, ledger):
    path.mkdir(parents=True, exist_ok=True)
worker = Path(__file__).with_name("chaos_worker.py")
node = f"node={os.environ.get('SLURM_PROCID') or os.environ['JOB_COMPLETION_INDEX']}"
sys.argv = [
    str(worker),
    mode,
    str(record),
    str(Path(directory, "orders")),
    str(ledger),
    node,
    *keys,
]
runpy.run_path(str(worker), run_name="__main__")
