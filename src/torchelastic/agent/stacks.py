"""What the threads of a worker that hangs are doing, read from outside."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

#: How long reading a stack may take, and how much of one is shown.
STACK, STACK_BYTES = 2.0, 1 << 16


def is_frozen(pid: int | None) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    return _state(Path(f"/proc/{pid}")) in ("T", "t")


def is_busy(pid: int) -> bool:
    """Whether a thread of a process runs, would run if there were a processor, or reads a disk."""
    with suppress(OSError):
        return any(_state(task) in ("R", "D") for task in Path(f"/proc/{pid}/task").iterdir())
    return False


def _state(process: Path) -> str:
    """The kernel's letter for what a process or a thread does; empty where it is gone."""
    with suppress(OSError):
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


async def stack_of(pid: int | None) -> str:
    """The Python stacks of a process, read from outside; empty where py-spy is not installed."""
    program = shutil.which("py-spy")
    if program is None or pid is None:
        return ""
    asked = await asyncio.create_subprocess_exec(
        *(program, "dump", "--nonblocking", "--pid", str(pid)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(asked.communicate(), STACK)
    except asyncio.TimeoutError:
        asked.kill()
        await asked.wait()
        return ""
    return output.decode(errors="replace")
