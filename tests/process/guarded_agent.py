"""An agent under its guard, with two workers: `python guarded_agent.py DIRECTORY [OPTION…]`.

Options are `zygote` and `cgroup`. The workers run DIRECTORY/train.py. Their pids, the agent's and
the zygote's go to DIRECTORY/pids.json when all have been started.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from torchelastic import env
from torchelastic.agent.guard import GUARD_LOST_SIGNAL, guarded
from torchelastic.config import Entry

WORKERS = 2


def write(path: Path, content: object) -> None:
    """All of it or nothing, for somebody who looks whether the file is there."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.rename(path)


async def be_agent(directory: Path, warm: bool) -> int:
    from torchelastic.agent.spawn.processes import command_line
    from torchelastic.agent.spawn.zygote_client import Zygote
    from torchelastic.agent.workers.supervisor import Supervisor, WorkerSpawn
    from torchelastic.system.cgroup import Cgroup

    def guard_lost() -> None:
        supervisor.kill_everything()
        os._exit(1)

    entry = Entry("script", str(directory / "train.py"))
    environ = {**env.snapshot(), "DIR": str(directory)}
    zygote = None
    if warm:
        command = command_line(entry, sys.executable)
        zygote = Zygote.start(
            python=sys.executable, env=environ, preload=[], command=command, preforks=WORKERS
        )
    cgroup = Cgroup.create() if "cgroup" in sys.argv else None
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(GUARD_LOST_SIGNAL, guard_lost)
    loop.add_signal_handler(signal.SIGTERM, asked_to_end.set)
    supervisor = Supervisor(zygote=zygote, cgroup=cgroup, on_exit=print, on_message=lambda *_: None)
    pids = await supervisor.start(
        [
            WorkerSpawn(
                local_rank=rank,
                entry=entry,
                env={**environ, "RANK": str(rank)},
            )
            for rank in range(WORKERS)
        ]
    )
    while zygote is not None and len(zygote.preforks()) < WORKERS:
        await asyncio.sleep(0.005)
    everybody = {
        "agent": os.getpid(),
        "workers": list(pids.values()),
        "zygote": zygote.pid if zygote is not None else None,
        "cgroup": cgroup.path if cgroup is not None else None,
    }
    write(directory / "pids.json", everybody)
    await asked_to_end.wait()
    await supervisor.stop(timeout=0.3)
    if zygote is not None:
        await zygote.close()
    supervisor.close()
    return 7


if __name__ == "__main__":
    sys.exit(guarded(lambda: asyncio.run(be_agent(Path(sys.argv[1]), "zygote" in sys.argv))))
