"""Nothing outlives its agent: whichever process is killed, everything that it led to is gone."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.light import with_light_torch
from tests.process import guarded_agent
from tests.process.jobs import alive, tree
from tests.support import poll_for
from torchelastic import env

# A worker with all the company workers keep: a forked child, as DataLoader has; a program; a
# grandchild in a session of its own. None of them heeds SIGTERM.
TRAIN = """
import os, signal, subprocess, sys
directory, rank = os.environ["DIR"], os.environ["RANK"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def stay(name):
    with open(os.path.join(directory, f"{rank}.{name}.part"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, file.name.removesuffix(".part"))
    while True:
        signal.pause()

if os.fork() == 0:
    stay("child")
program = "import time; time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        stay("grandchild")
    os._exit(0)
stay("worker")
"""

LOADER = """
import os, signal, time
import torch
from torch.utils.data import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        name = os.path.join(os.environ["DIR"], f"{os.environ['RANK']}.loader{os.getpid()}")
        with open(name, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(1000)

if __name__ == "__main__":
    next(iter(DataLoader(Slow(), num_workers=2)))
"""


class Job:
    """A guarded agent and all that it led to."""

    def __init__(self, directory, *options, environ=None, source=TRAIN, files=6):
        (directory / "train.py").write_text(source)
        self.guard = subprocess.Popen(
            [sys.executable, guarded_agent.__file__, str(directory), *options],
            env=environ or with_light_torch(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        pids = poll_for(lambda: self._read(directory / "pids.json"), what="workers", timeout=90)
        self.agent, self.workers, self.zygote = pids["agent"], pids["workers"], pids["zygote"]
        self.cgroup = pids["cgroup"]
        poll_for(
            lambda: len([name for name in os.listdir(directory) if self._is_pid(name)]) == files,
            what="everything that the workers start",
            timeout=90,
        )
        self.everybody = tree(self.guard.pid)

    def _read(self, path):
        assert self.guard.poll() is None, self.guard.communicate()
        return json.loads(path.read_text()) if path.exists() else None

    def _is_pid(self, name):
        return name[0].isdigit() and not name.endswith(".part")

    def left(self):
        return [pid for pid in self.everybody if alive(pid)]

    def end(self):
        self.guard.wait(30)
        return self.guard.returncode

    def close(self):
        """Also of a test that failed."""
        if self.guard.poll() is None:
            self.guard.terminate()
            self.guard.wait(30)
        self.guard.stdout.close()
        self.guard.stderr.close()


def assert_all_gone(job):
    poll_for(lambda: not job.left(), what=f"the end of {job.left()}")


@pytest.fixture
def start(tmp_path):
    """Starts one job in the test's directory."""
    with contextlib.ExitStack() as jobs:
        yield lambda *options, **more: jobs.enter_context(
            contextlib.closing(Job(tmp_path, *options, **more))
        )


@pytest.mark.parametrize("options", [(), ("zygote",), ("zygote", "cgroup")], ids="-".join)
@pytest.mark.parametrize("victim", ["guard", "agent"])
def test_nothing_survives_kill_9(start, victim, options):
    job = start(*options)
    assert len(job.everybody) >= 2 + 2 * 4 + (3 if "zygote" in options else 0)
    os.kill(job.guard.pid if victim == "guard" else job.agent, signal.SIGKILL)
    assert_all_gone(job)
    assert job.end() == (-9 if victim == "guard" else 137)
    assert job.cgroup is None or not os.path.exists(job.cgroup)


@pytest.mark.slow
def test_data_loaders_do_not_survive_kill_9_of_the_agent(start):
    """As the forked children above, with torch's own processes and a zygote that imports it."""
    job = start("zygote", environ=env.snapshot(), source=LOADER, files=4)
    os.kill(job.agent, signal.SIGKILL)
    assert_all_gone(job)


@pytest.mark.needs("cgroup")
def test_nothing_survives_kill_9_of_both_where_there_is_a_cgroup(start):
    job = start("zygote", "cgroup")
    os.kill(job.guard.pid, signal.SIGSTOP)  # so that it cannot do its work
    os.kill(job.agent, signal.SIGKILL)
    os.kill(job.guard.pid, signal.SIGKILL)
    assert_all_gone(job)
    poll_for(lambda: not os.path.exists(job.cgroup), what="the end of the cgroup")


def test_a_stop_takes_everything_and_ends_in_order(start):
    job = start("zygote")
    os.kill(job.guard.pid, signal.SIGTERM)
    assert_all_gone(job)
    assert job.end() == 7
