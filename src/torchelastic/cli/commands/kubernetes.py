"""`torchelastic scale`, `delete` and `operator`, and `status` and `logs` of a job on Kubernetes."""

from __future__ import annotations

import contextlib
import json
import sys

from torchelastic.cli import terminal
from torchelastic.cli.parser import Parsed
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.kubernetes.job_control import JobControl
from torchelastic.config import values
from torchelastic.errors import EXIT_OK, ConfigError


def scale(parsed: Parsed) -> int:
    """Change the number of nodes of a job; return the exit code."""
    if len(parsed.command) < 2:
        raise ConfigError(f"Write a job and a number of nodes: {parsed.prog} JOB N.")
    job, number = parsed.command
    control = JobControl(ClusterApi())
    handle, nodes = control.find(job), values.whole(number)
    before = control.scale(handle, nodes)
    print(f"Scaled {handle} from {before} to {nodes} nodes.")
    return EXIT_OK


def delete(parsed: Parsed) -> int:
    """End a job and remove it; return the exit code."""
    control = JobControl(ClusterApi())
    handle = control.find(parsed.argument)
    control.delete(handle)
    print(f"Deleted {handle}.")
    return EXIT_OK


def operator(parsed: Parsed) -> int:
    """Run the controller of ElasticJobs until a signal; return the exit code."""
    # Imported here: the other commands do not need it.
    from torchelastic.cluster.operator.job_controller import JobController

    with contextlib.closing(ClusterApi()) as api:
        return JobController(api).run()


def status(parsed: Parsed) -> int:
    """Print what the cluster knows of the job and of each pod."""
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
