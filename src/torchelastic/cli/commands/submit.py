"""`torchelastic submit PLATFORM`: hand a job to a scheduler; one function per platform.

A scheduler gets a script: the job's directory, made with `JobDirectory.create`, holds the secret,
and a module of `cluster.submit` renders what the scheduler takes. Ray gets actors.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from torchelastic import env
from torchelastic.cli import checks, interrupted
from torchelastic.cli.parser import ARGUMENT, Parsed
from torchelastic.cli.planned_job import entry_of, launch_config, shape_of
from torchelastic.cluster.job_directory import JobDirectory
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.kubernetes.job_control import JobControl
from torchelastic.cluster.submit import kubernetes_manifests, runai_command, slurm_script
from torchelastic.cluster.submit.job_kinds import JOB_KINDS
from torchelastic.config import LaunchConfig
from torchelastic.errors import EXIT_OK, ConfigError


def slurm(parsed: Parsed) -> int:
    """Write a script for sbatch and submit it, or print it; return the exit code."""
    shape = shape_of(parsed)
    path = job_path(parsed)
    made = slurm_script.script(
        slurm_script.SlurmJob(
            name=Path(parsed.command[0]).name,
            directory=str(path),
            min_nodes=shape.min_nodes,
            max_nodes=shape.max_nodes,
            command=run_command(parsed),
            notice=parsed["notice"],
            time=parsed["time"],
            partition=parsed["partition"],
            array=parsed["array"],
            finds_tasks=parsed["array"] and not parsed["rdzv_endpoint"],
            witness=shape.max_nodes > 1 and not parsed["array"] and not _has_arbiter(parsed),
            options=parsed["sbatch_option"],
        )
    )
    if parsed["dry_run"]:
        print(made, end="")
        return EXIT_OK
    directory = JobDirectory.create(path)
    file = directory.path / "job.sbatch"
    file.write_text(made)
    try:
        number = _sbatch(file)
    except ConfigError:
        shutil.rmtree(directory.path)  # so that the same command can be given again
        raise
    print(f"Submitted Slurm job {number}. Its output, secret and result: {directory.path}")
    return EXIT_OK


def ray(parsed: Parsed) -> int:
    """Run a job on the nodes of a Ray cluster to its end; return the exit code."""
    from torchelastic.ray.ray_job import run_on_ray

    entry, resources = entry_of(parsed), ray_resources(parsed)
    config = ray_config(parsed, resources)
    try:
        result = run_on_ray(config, entry, resources=resources, address=parsed["address"])
    except KeyboardInterrupt:
        return interrupted()
    if result.error is not None:
        print(f"{parsed.prog}: {result.error}", file=sys.stderr)
    return result.exitcode


#: Flags that `submit ray` chooses a value for.
_CHOSEN_FOR_RAY = (
    *("rdzv_endpoint", "rdzv_backend", "rdzv_conf", "rdzv_secret_file", "node_rank"),
    *("standalone", "local_addr", "master_addr", "master_port"),
)


def ray_resources(parsed: Parsed) -> dict[str, float]:
    """Return what Ray reserves on each node; empty: one CPU per worker."""
    named = {"CPU": parsed["num_cpus"], "GPU": parsed["num_gpus"]}
    given = {name: value for name, value in named.items() if value is not None}
    return {**given, **parsed["resources"]}


def ray_config(parsed: Parsed, resources: Mapping[str, float]) -> LaunchConfig:
    """Return the job that the flags describe."""
    from torchelastic.ray.ray_job import LATER, workers_of

    _refuse(parsed, _CHOSEN_FOR_RAY)
    workers = shape_of(parsed).workers
    if isinstance(workers, str):
        raise ConfigError(
            f"--nproc-per-node {workers} counts the devices of this machine, but workers run on "
            "others: write a number, or only --num-gpus."
        )
    values = {**parsed.values, "rdzv_endpoint": LATER}
    strength = {**parsed.strength, "rdzv_endpoint": ARGUMENT}
    if not parsed.given("shape") and not parsed.given("nproc_per_node"):
        values["nproc_per_node"] = workers_of(resources)
    config = launch_config(replace(parsed, values=values, strength=strength), env.snapshot())
    return config if parsed.given("rdzv_id") else replace(config, run_id="")


def _refuse(parsed: Parsed, chosen: Sequence[str]) -> None:
    """Raise `ConfigError` if a flag is given that the command chooses a value for."""
    for dest in chosen:
        if parsed.strength[dest] == ARGUMENT:
            flag = f"--{dest.replace('_', '-')}"
            raise ConfigError(f"{flag} is chosen by {parsed.prog}: remove it.")


def _has_arbiter(parsed: Parsed) -> bool:
    """Return whether the flags say who continues when others are lost."""
    flags = ("witness", "quorum", "two_node_takeover", "rdzv_endpoint", "rdzv_backend")
    return any(parsed.given(dest) for dest in flags)


def runai(parsed: Parsed) -> int:
    """Submit a job with Run:ai's command line, or print the command; return the exit code."""
    entry, shape = entry_of(parsed), shape_of(parsed)
    if not parsed["image"]:
        raise ConfigError("No --image given: name one that has torchelastic and the script in it.")
    command = runai_command.words(
        runai_command.RunaiJob(
            name=parsed["name"] or workload_name(entry.target),
            image=parsed["image"],
            min_nodes=shape.min_nodes,
            max_nodes=shape.max_nodes,
            command=["torchelastic", "run", *parsed.words, "--", *parsed.command],
            legacy=parsed["legacy_cli"],
            project=parsed["project"],
            gpus=parsed["gpus"],
            environment=parsed["environment"],
            ports=parsed["port"],
            run_as_user=parsed["run_as_user"],
            job_dir=parsed["job_dir"],
            options=parsed["runai_option"],
        )
    )
    if shape.max_nodes > 1 and not parsed["job_dir"] and not parsed["rdzv_secret_file"]:
        print(
            f"{parsed.prog}: The job has no secret: give --job-dir on a volume that all pods "
            "share, or --rdzv-secret-file.",
            file=sys.stderr,
        )
    if parsed["dry_run"]:
        print(shlex.join(command))
        return EXIT_OK
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(
            "runai not found: install Run:ai's command line, or print the command with --dry-run."
        ) from None


def kubernetes(parsed: Parsed) -> int:
    """Create the objects of a job in a Kubernetes cluster, or print them; return the exit code."""
    _refuse(parsed, ["health_port"])  # the probes of the pods ask there
    shape = shape_of(parsed)
    if not parsed["image"]:
        raise ConfigError("No --image given: name one that has torchelastic and the script in it.")
    made = JOB_KINDS[parsed["as"]].manifests(
        kubernetes_manifests.KubernetesJob(
            name=parsed["name"] or f"{workload_name(entry_of(parsed).target)}-{token_hex(3)}",
            namespace=parsed["namespace"],
            image=parsed["image"],
            min_nodes=shape.min_nodes,
            max_nodes=shape.max_nodes,
            arguments=[*parsed.words, "--", *parsed.command],
            secret=token_hex(32),
            queue=parsed["queue"],
            pod_template=_pod_template(parsed["pod_template"]),
        )
    )
    if parsed["dry_run"]:
        print(_rendered(made, parsed["output"]), end="")
        return EXIT_OK
    control = JobControl(ClusterApi())
    control.check_release()
    handle = control.submit(made)
    print(f"Submitted {handle}. See it with: torchelastic status {handle}")
    return EXIT_OK


def _pod_template(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open(path) as file:
            data = _yaml().safe_load(file)
    except (OSError, _yaml().YAMLError) as error:
        raise ConfigError(
            f"Cannot read --pod-template {path} ({error}): name a YAML file."
        ) from None
    return kubernetes_manifests.pod_template(data, path)


def _rendered(manifests: Sequence[Any], form: str) -> str:
    if form == "json":
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}, indent=2) + "\n"
    return str(_yaml().safe_dump_all(manifests, sort_keys=False))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError("PyYAML is not installed: pip install pyyaml.") from None
    return yaml


def workload_name(target: str) -> str:
    """Return a name that Kubernetes accepts, of a script or module.

    >>> workload_name("/app/train_LM.py")
    'train-lm'
    """
    return re.sub("[^a-z0-9]+", "-", Path(target).stem.lower()).strip("-")


def job_path(parsed: Parsed) -> Path:
    """Return the path of the job's directory, which must not exist yet."""
    entry = entry_of(parsed)
    checks.check_entry(entry, env.snapshot())
    if parsed["job_dir"]:
        return Path(parsed["job_dir"]).absolute()
    return Path.cwd() / "torchelastic-jobs" / f"{Path(entry.target).stem}-{token_hex(3)}"


def run_command(parsed: Parsed) -> list[str]:
    """Return the command of a node: `run` with the flags that were given."""
    return [sys.executable, "-m", "torchelastic", "run", *parsed.words, "--", *parsed.command]


def _sbatch(file: Path) -> str:
    """Submit a script; return the number of the job."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            "sbatch not found: run this where Slurm is installed, or print the script with "
            "--dry-run."
        ) from None
    if done.returncode:
        why = "; ".join(done.stderr.strip().splitlines())
        raise ConfigError(f"sbatch refused the job: {why or 'it gave no reason'}.")
    return done.stdout.strip().partition(";")[0]
