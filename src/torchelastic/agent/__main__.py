"""`python -m torchelastic.agent REQUEST OUTCOME`: the agent process of `elastic_launch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torchelastic.agent.guard import run_job
from torchelastic.config import Entry, LaunchConfig
from torchelastic.system.linux import die_with_parent


def main() -> int:
    request = json.loads(Path(sys.argv[1]).read_text())
    die_with_parent(request["parent"])
    config = LaunchConfig.from_json(request["config"])
    asked = request["entry"]
    entry = Entry(asked["kind"], asked["target"], tuple(asked["args"]))
    return run_job(config, entry, outcome=Path(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
