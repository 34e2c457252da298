"""Text about failures, for people. Pure: facts in, text out.

The last block keeps the labels of torch's `ChildFailedError`, which users and their tools look for.
It names the first failure of the whole job, the same on every node.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime

from torchelastic.config import Entry, LaunchConfig
from torchelastic.events import words
from torchelastic.events.failure import Failure, signal_name
from torchelastic.rendezvous import root_cause
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders

_WIDTH = 60
#: Most failures that are listed: a job may have thousands.
_FAILURES_SHOWN = 16
#: Characters of an error message that are shown in one line.
_LINE_LENGTH = 200

#: The usual cause of a signal, where it is certain enough to help.
_SIGNAL_WORDS = {
    "SIGABRT": "it called abort(); often a failed check in C++ code",
    "SIGBUS": "bus error, often a full /dev/shm or disk behind mapped memory",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "illegal instruction, often a binary built for another CPU",
    "SIGSEGV": "segmentation fault in native code",
}

#: Exit codes by which shells report errors of their own.
_SHELL_WORDS = {
    126: "the shell could not execute the command",
    127: "the shell did not find the command",
}


_ENTRY_FLAGS = {"script": (), "module": ("-m",), "program": ("--no-python",)}


def command_for_others(config: LaunchConfig, entry: Entry) -> str:
    """The command that starts the other nodes; empty for one node, a Python function, or a platform
    that starts them."""
    if config.max_nodes == 1 or config.incarnation or entry.kind not in _ENTRY_FLAGS:
        return ""
    least, most = config.min_nodes, config.max_nodes
    flags = {
        "nnodes": str(most) if least == most else f"{least}:{most}",
        "nproc-per-node": str(config.nproc_per_node),
        "rdzv-backend": "" if config.rdzv_backend == "c10d" else config.rdzv_backend,
        "rdzv-endpoint": config.rdzv_endpoint,
        "rdzv-id": config.run_id,
        "node-rank": "RANK" if config.node_rank is not None else "",
        "rdzv-secret-file": config.rdzv_secret_file or "",
        "rdzv-tls-cert": config.rdzv_tls_cert or "",
        "rdzv-tls-key": config.rdzv_tls_key or "",
        "rdzv-tls-ca": config.rdzv_tls_ca or "",
    }
    given = [f"--{name}={value}" for name, value in flags.items() if value]
    what = [*_ENTRY_FLAGS[entry.kind], entry.target, *entry.args]
    return shlex.join(["torchelastic", "run", *given, *what])


def exit_words(exitcode: int) -> str:
    """Describe an exit code as `subprocess` has it: a negative number is a signal.

    >>> exit_words(-9), exit_words(3)
    ('killed by SIGKILL', 'exit code 3')
    """
    if exitcode < 0:
        name = signal_name(-exitcode)
        words = _SIGNAL_WORDS.get(name)
        return f"killed by {name} ({words})" if words else f"killed by {name}"
    words = _SHELL_WORDS.get(exitcode, "")
    if 128 < exitcode <= 192:
        words = f"a shell's code for {signal_name(exitcode - 128)}"
    return f"exit code {exitcode} ({words})" if words else f"exit code {exitcode}"


def beginning(begins: orders.Begins, *, best_step: int, in_process: bool) -> str:
    """The warning about a training that starts at step 0; empty: none.

    `best_step` is the furthest step of the job. Workers inside `train` hold the state
    themselves; for a script the agents hold it.
    """
    if begins.step > 0:
        return ""
    advice = (
        ""
        if begins.stored
        else (
            " To write checkpoints: torchelastic.checkpoint.set_checkpoint_manager(CheckpointStore("
            '"/shared/job", every="auto")).'
        )
    )
    if best_step > 0:
        return (
            f"All copies of the training state were lost: training restarts at step 0 (generation "
            f"{begins.generation}). It had reached step {best_step}.{advice}"
        )
    if begins.stored:
        return ""
    holders = "workers" if in_process else "nodes"
    return (
        f"No checkpoint directory is set: if all {holders} are lost at once, training restarts at "
        f"step 0.{advice}"
    )


def with_hint(words: str, hint: str) -> str:
    """Add the hint to the description of an exit, if it is certain.

    >>> with_hint("killed by SIGKILL", "out of memory: the kernel killed it (limit 2.0 GiB; ...)")
    'killed by SIGKILL: out of memory'
    """
    found, _, _ = hint.partition(":")
    return f"{words}: {found}" if found == "out of memory" else words


def world_sentence(world: World) -> str:
    """`generation 4: 4 workers on 2 nodes (node-a, node-b): rank 2 …; 1 of 3 restarts used`."""
    names = words.listed([node.name for node in world.nodes], world.count)
    spares = f", spare: {words.listed(world.spares, world.spare_count)}" if world.spares else ""
    who = words.worker_count(world.size, world.replica)
    return (
        f"generation {world.generation}: {who} on {words.counted(world.count, 'node')} "
        f"({names}){spares}: {one_line(world.reason)}"
    )


def is_cause_known(over: World) -> bool:
    """Return whether the failure that ended a generation is more than the loss of a peer, which
    its connections may show before its agent sees it end."""
    return over.cause is None or not root_cause.waited_for_others(over.cause)


def why_over(over: World, following: World | None = None) -> str:
    """Return why a generation is over, with the first failure as the world that follows knows
    it."""
    cause = following.cause if following is not None else None
    is_newer = cause is not None and cause.generation == over.generation
    if cause is None or not is_newer or is_cause_known(over) or root_cause.waited_for_others(cause):
        return over.reason
    return cause.sentence()


def job_failed(world: World, *, name: str = "job") -> str:
    """The final block of a job that failed."""
    title = f"{name} FAILED in generation {world.generation}: {ending(world)}"
    return failures_block(title, world.cause, world.consequences)


def failures_block(title: str, cause: Failure | None, others: Sequence[Failure]) -> str:
    """The first failure in full, the others in one line each."""
    border, section = "=" * _WIDTH, "-" * _WIDTH
    lines = [border, title, section]
    if cause is not None:
        of_node = [_row("host", cause.node), _row("error", cause.message)]
        details = of_node if cause.is_node else _details(cause)
        lines += ["Root Cause (first observed failure):", "[0]:", *details, section]
    causes = [one for one in others if one.by_itself]
    fell = [one for one in others if not one.by_itself]
    if causes:
        lines += ["Failed independently:", *_others(causes)]
    if fell:
        lines += ["Failed as a consequence:" if cause else "Failures:", *_others(fell)]
    elif cause is not None and not causes:
        lines += ["No other failures."]
    return "\n".join(["", *lines, border])


def one_line(text: str) -> str:
    """The first line, cut where it gets too long: gloo's messages run over a dozen.

    >>> one_line("boom\\nat: here")
    'boom …'
    """
    first, _, rest = text.strip().partition("\n")
    if len(first) > _LINE_LENGTH:
        return first[: _LINE_LENGTH - 1] + "…"
    return f"{first} …" if rest else first


def ending(world: World) -> str:
    """Why the job was not restarted, without the failure that is shown below."""
    cause = world.cause.sentence() if world.cause is not None else ""
    return one_line(world.reason.removeprefix(cause).removeprefix("; ") or "a worker failed")


def _details(failure: Failure) -> list[str]:
    signal = f" ({signal_name(-failure.exitcode)})" if failure.exitcode < 0 else ""
    when = datetime.fromtimestamp(failure.wall_time).isoformat(sep="_", timespec="milliseconds")
    rows = {
        "time": when,
        "host": failure.node,
        "rank": f"{failure.rank} (local_rank: {failure.local_rank})",
        "step": failure.step,
        "exitcode": f"{failure.exitcode} (pid: {failure.pid}){signal}",
        "error_file": failure.error_file or "<N/A>",
        "error": failure.message,
        "hint": failure.hint or None,
        "collective": failure.collective or None,
        "traceback": failure.traceback or "none: the worker ended without a Python exception",
        "last lines": "".join(f"\n  {line}" for line in failure.log_lines) or None,
    }
    return [_row(label, str(value)) for label, value in rows.items() if value is not None]


def _row(label: str, value: str) -> str:
    space = "" if value.startswith("\n") else " "
    return f"  {label:<10}:{space}" + value.rstrip().replace("\n", "\n  ")


def _others(failures: Sequence[Failure]) -> list[str]:
    lines = [f"  {one_line(failure.sentence())}" for failure in failures[:_FAILURES_SHOWN]]
    more = len(failures) - _FAILURES_SHOWN
    return [*lines, f"  and {more} more"] if more > 0 else lines
