"""The script that `torchelastic submit slurm` hands to sbatch. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from torchelastic.cluster.platform import JOB_DIR
from torchelastic.config import DEFAULT_PORT
from torchelastic.errors import ConfigError

#: The ports of job arrays, from the default port on.
PORTS = 500
#: What the script does after srun, in one place: job_directory says what the files mean.
_AFTER = """\
if [ -e "$TORCHELASTIC_JOB_DIR/finished" ]; then exit 0; fi
if [ -e "$TORCHELASTIC_JOB_DIR/failed" ]; then exit "$(cat "$TORCHELASTIC_JOB_DIR/failed")"; fi
# Codes from 128 on are interruptions: the time limit, a preemption, lost nodes.
if [ "$code" -ge 128 ]; then
  echo "Interrupted (exit code $code) before the training was complete: queueing job {job} again."
  scontrol requeue "{job}" || echo "Slurm did not queue it again: it was cancelled, or may not be."
fi
exit "$code"
"""


#: One for each start: when Slurm starts a job again, nothing of the last start is left.
_WITNESS = 'export PET_WITNESS="$TORCHELASTIC_JOB_DIR/witness-${SLURM_RESTART_COUNT:-0}"'


#: A job that has failed starts again only if a user has queued it again. A task of an array may
#: just have waited for its node.
_AGAIN = f'rm -f "${JOB_DIR}/failed"'
_NOT_AGAIN = f"""\
if [ -e "${JOB_DIR}/failed" ]; then
  echo "The job has failed: this task does not start it again. To allow it: rm ${JOB_DIR}/failed"
  exit "$(cat "${JOB_DIR}/failed")"
fi"""


#: Slurm shows a task as running before its script starts. So of two tasks, the later one sees the
#: earlier one, and the first sees only itself.
_MEET = f"""\
# Tasks that run now, oldest first: any of them knows the job. The first one starts it.
port=$(({DEFAULT_PORT} + SLURM_ARRAY_JOB_ID % {PORTS}))
running="--noheader --states=RUNNING --jobs=$SLURM_ARRAY_JOB_ID"
until tasks=$(squeue $running --format="%S %N" | sort); [ -n "$tasks" ]; do
  echo "squeue shows no task of job $SLURM_ARRAY_JOB_ID: asking again in 5 s."
  sleep 5
done
hosts=$(head -n 3 <<<"$tasks" | sed "s/.* //; s/$/:$port/")
export PET_RDZV_ENDPOINT=${{hosts//$'\\n'/,}}"""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job for sbatch."""

    name: str
    #: The directory of the job, and that in which it is started.
    directory: str
    min_nodes: int
    max_nodes: int
    #: `torchelastic run` with its flags, the script and its arguments.
    command: Sequence[str]
    #: Seconds before the time limit at which the nodes are asked to leave.
    notice: int
    time: str = ""
    partition: str = ""
    #: One task of a job array for each node, instead of one job.
    array: bool = False
    #: An array whose tasks find each other through Slurm, because no endpoint was given.
    finds_tasks: bool = False
    #: The job's directory has the deciding vote if half of the nodes are lost.
    witness: bool = False
    #: Options of sbatch, as they are.
    options: Sequence[str] = ()


def script(job: SlurmJob) -> str:
    """Return the text of the script."""
    limit = seconds(job.time)
    if limit is not None and limit <= job.notice:
        raise ConfigError(
            f"--time {job.time} is not longer than --notice {job.notice} s: the job would leave as "
            "soon as it starts, and be queued again for ever. Give it more time or less notice."
        )
    number = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if job.array else "$SLURM_JOB_ID"
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job)), ""]
    lines += [
        "# Written by `torchelastic submit slurm`.",
        f"export {JOB_DIR}={shlex.quote(job.directory)}",
        _NOT_AGAIN if job.array else _AGAIN,
        *(["export PET_RDZV_ID=$SLURM_ARRAY_JOB_ID"] if job.array else []),
        *([_MEET] if job.finds_tasks else []),
        *([_WITNESS] if job.witness else []),
        "# A lost node ends neither the step nor, by --no-kill above, the job.",
        "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 \\",
        f"  {shlex.join(job.command)}",
        "code=$?",
        "",
    ]
    return "\n".join(lines) + _AFTER.format(job=number)


def _options(job: SlurmJob) -> list[str]:
    output = f"{job.directory.replace('%', '%%')}/slurm-%{'A_%a' if job.array else 'j'}.out"
    chosen = [f"--job-name={shlex.quote(job.name)}"]
    if job.array:
        chosen += ["--nodes=1", f"--array=0-{job.max_nodes - 1}"]
    else:
        chosen += [f"--nodes={job.min_nodes}-{job.max_nodes}"]
    # No number of tasks: Slurm would multiply it by MIN, and give the job MIN nodes.
    chosen += [] if any(map(_asks_for_cpus, job.options)) else ["--exclusive"]
    chosen += ["--no-kill", "--requeue", "--open-mode=append"]
    chosen += [f"--signal=TERM@{job.notice}", f"--output={shlex.quote(output)}"]
    chosen += [f"--time={job.time}"] if job.time else []
    chosen += [f"--partition={job.partition}"] if job.partition else []
    for option in job.options:
        if not option.startswith("-") or "\n" in option:
            raise ConfigError(
                f"--sbatch-option '{option}' is not an option of sbatch: write it with its dashes, "
                "as in --sbatch-option=--gpus-per-node=8."
            )
    return [*chosen, *job.options]


def _asks_for_cpus(option: str) -> bool:
    """Whether an option of sbatch says how many CPUs of each node the job takes; else: all.

    >>> [_asks_for_cpus(option) for option in ("--cpus-per-task=8", "-c 8", "--comment=c")]
    [True, True, False]
    """
    return option.startswith(("--cpus-per-task", "-c"))


def seconds(limit: str) -> int | None:
    """Return a time limit of sbatch in seconds; None: it has none, or is left to sbatch to refuse.

    >>> seconds("90"), seconds("1:30"), seconds("4:00:00"), seconds("1-0"), seconds("UNLIMITED")
    (5400, 90, 14400, 86400, None)
    """
    days, dash, rest = limit.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(part.isdigit() for part in [*parts, days or "0"]):
        return None
    # D-H[:M[:S]], H:M:S, M:S or M.
    first = 0 if dash or len(parts) == 3 else 1
    units = (3600, 60, 1)[first:]
    total = int(days or 0) * 86400 + sum(
        int(n) * unit for n, unit in zip(parts, units, strict=False)
    )
    return total or None
