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
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "Tt"
    return False


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
