"""`status` and `logs` of a job on Kubernetes: what the cluster knows of its pods."""

from __future__ import annotations

import json
import sys

from torchelastic.cli import terminal
from torchelastic.cli.options.parser import Parsed
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.kubernetes.job_control import JobControl
from torchelastic.errors import EXIT_OK, ConfigError


def status(parsed: Parsed) -> int:
    """Print the state of the job and of each pod."""
    control = JobControl(ClusterApi())
    found = control.summary(control.find(parsed.argument))
    text = json.dumps(found.to_json(), indent=2) if parsed["json"] else "\n".join(found.lines())
    terminal.show(text)
    return EXIT_OK


def logs(parsed: Parsed) -> int:
    """Print the output of the pods, each line with its pod."""
    for dest in ("rank", "generation"):
        if parsed[dest] is not None:
            raise ConfigError(
                f"--{dest} needs the log files of a node: run `torchelastic logs` in a pod, with "
                "`kubectl exec`."
            )
    control = JobControl(ClusterApi())

    def show(pod: str, line: bytes) -> None:
        if parsed["raw"]:
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()
        else:
            terminal.show(f"{pod}: {line.decode('utf-8', 'replace')}")

    try:
        control.logs(
            control.find(parsed.argument), show, follow=parsed["follow"], lines=parsed["lines"]
        )
    except BrokenPipeError:
        terminal.discard_output()
    except KeyboardInterrupt:
        pass
    return EXIT_OK
