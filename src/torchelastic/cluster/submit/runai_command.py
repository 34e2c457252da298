"""The command line of Run:ai's CLI that `torchelastic submit runai` runs. Pure.

Options: run-ai/docs v2.20, cli-reference/new-cli/runai_pytorch_submit.md, and for the CLI before
2.17 cli-reference/runai-submit-dist-pytorch.md. `-e` and `-g` mean the same in all versions, while
the long `--environment` became the name of an asset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchelastic.cluster.platform import JOB_DIR
from torchelastic.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunaiJob:
    """A job for Run:ai."""

    name: str
    image: str
    min_nodes: int
    max_nodes: int
    #: `torchelastic run` with its flags, the script and its arguments.
    command: Sequence[str]
    #: `runai submit-dist pytorch` instead of `runai training pytorch submit`.
    legacy: bool = False
    project: str = ""
    gpus: str = ""
    #: As `NAME=VALUE`.
    environment: Sequence[str] = ()
    #: As `service-type=NodePort,container=8080[,external=30080]`.
    ports: Sequence[str] = ()
    run_as_user: bool = False
    #: Directory in the containers, on a volume that they share.
    job_dir: str = ""
    #: Options of runai, as they are.
    options: Sequence[str] = ()


def words(job: RunaiJob) -> list[str]:
    """Return the words of the command."""
    return [
        *(["runai", "submit-dist", "pytorch", "--name"] if job.legacy else _TODAY),
        *(job.name, "--image", job.image),
        *_replicas(job),
        *(["--project", job.project] if job.project else []),
        *(["-g", job.gpus] if job.gpus else []),
        *(word for variable in _environment(job) for word in ("-e", variable)),
        *(word for port in job.ports for word in _port(port, legacy=job.legacy)),
        *(["--run-as-user"] if job.run_as_user else []),
        *_options(job.options),
        *("--command", "--", *job.command),
    ]


_TODAY = ("runai", "training", "pytorch", "submit")


def _replicas(job: RunaiJob) -> list[str]:
    """Return how many pods there are, one for each node.

    Without a master all pods are equal, and only an elastic job tells them then where to meet. The
    older CLI always adds a master: it is one of the nodes.
    """
    least, most = job.min_nodes, job.max_nodes
    if job.legacy:
        least, most = max(least - 1, 1), most - 1
    elastic = ["--min-replicas", str(least), "--max-replicas", str(most)] if most else []
    return [*([] if job.legacy else ["--no-master"]), "--workers", str(most), *elastic]


def _environment(job: RunaiJob) -> list[str]:
    for variable in job.environment:
        name, equals, _ = variable.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--environment '{variable}' is not a variable: write NAME=VALUE.")
        if name == "TORCHELASTIC_SECRET":
            raise ConfigError(
                "--environment would show TORCHELASTIC_SECRET to everyone who can see the "
                "workload: remove it and give --job-dir, or mount a Kubernetes Secret and name its "
                "file with --rdzv-secret-file."
            )
    directory = [f"{JOB_DIR}={job.job_dir.rstrip('/')}/{job.name}"] if job.job_dir else []
    return [*job.environment, *directory]


def _port(port: str, *, legacy: bool) -> list[str]:
    if not legacy:
        return ["--port", port]
    parts = dict(part.partition("=")[::2] for part in port.split(","))
    if "container" not in parts:
        raise ConfigError(
            f"--port '{port}' names no port of the container: write "
            "service-type=NodePort,container=8080."
        )
    external = f"{parts['external']}:" if "external" in parts else ""
    service = parts.get("service-type", "NodePort").lower()
    return ["--service-type", service, "--port", f"{external}{parts['container']}"]


def _options(options: Sequence[str]) -> Sequence[str]:
    for option in options:
        if not option.startswith("-"):
            raise ConfigError(
                f"--runai-option '{option}' is not an option of runai: write it with its dashes, "
                "as in --runai-option=--large-shm."
            )
    return options
