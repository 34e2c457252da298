"""The data of one worker ends before that of the others: nobody hangs, nobody has less."""

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.training.fake_agent import FakeAgent, store
from torchelastic.worker.orders import Enlisted, Finished, Over, PeerLost, Stopped, Up

ROOT = Path(__file__).parents[2]

with store():
    pass  # libuv, under the first one, opens a pipe for the life of the process


def start(stack, port, flag):
    """A worker, and its agent's end of the channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stack.enter_context(ours)
    with theirs:
        command = [sys.executable, "-m", "tests.process.pair_worker", str(theirs.fileno()), flag]
        worker = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True
        )
    stack.enter_context(worker)  # closes its pipe and waits for it
    stack.callback(worker.kill)
    return worker, FakeAgent(ours, port)


def test_who_is_behind_runs_the_last_step_to_its_end_and_who_is_ahead_is_freed(tmp_path):
    flag = tmp_path / "flag"
    with ExitStack() as stack:
        port = stack.enter_context(store())
        workers, agents = zip(*(start(stack, port, str(flag)) for _ in range(2)), strict=True)
        for rank, agent in enumerate(agents):
            agent.hear(Enlisted, timeout=60)
            agent.enter(0, rank=rank, size=2)
        for agent in agents:
            agent.hear(Up, timeout=60)
        assert agents[1].hear(Finished) == Finished(0, 3)
        for agent in agents:
            agent.say(Over(0, "the training is done", finished=True, through=2))
        assert agents[1].hear(Stopped) == Stopped(0, 3)
        flag.touch()
        assert agents[0].hear(Stopped) == Stopped(0, 3)
        for worker in workers:
            assert worker.communicate(timeout=60)[0].split() == ["3", "6"]
            assert worker.returncode == 0


@pytest.mark.parametrize("hears_first", [0, 1])
def test_who_waits_for_a_worker_without_data_is_freed(tmp_path, hears_first):
    """Rank 0 waits in a collective. Where its peer hears first, and leaves, it has lost a peer."""
    flag = tmp_path / "flag"
    flag.touch()
    with ExitStack() as stack:
        port = stack.enter_context(store())
        workers, agents = zip(*(start(stack, port, str(flag)) for _ in range(2)), strict=True)
        for rank, agent in enumerate(agents):
            agent.hear(Enlisted, timeout=60)
            agent.enter(0, rank=rank, size=2)
        for agent in agents:
            agent.hear(Up, timeout=60)
        agents[1].hear(Finished)
        for rank in (hears_first, 1 - hears_first):
            if rank < hears_first:
                assert agents[0].hear(PeerLost).step == 3
            agents[rank].say(Over(0, "the training is done", finished=True, through=2))
            assert agents[rank].hear(Stopped) == Stopped(0, 3)
        for worker in workers:
            assert worker.communicate(timeout=60)[0].split() == ["3", "6"]
            assert worker.returncode == 0
