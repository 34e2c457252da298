"""The data of one worker ends before that of the others: nobody hangs, nobody has less."""

import multiprocessing
import socket
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.support import poll_for
from tests.unit.training.fake_agent import Coordinator, FakeAgent, store
from torchelastic.worker.orders import Enlisted, Finished, Over, PeerLost, Stopped, Up

# --- a worker of a world of two whose agent is the test ------------------------------------------


class Sum(torchelastic.State):
    def __init__(self) -> None:
        self.step, self.total = 0, 0

    def sync(self) -> None:
        mine = torch.tensor([self.step, self.total])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        self.step, self.total = mine.tolist()

    def snapshot(self) -> Any:
        return self.step, self.total

    def apply(self, snapshot: Any) -> None:
        self.step, self.total = snapshot


def train_step(flag: Path, state: Sum) -> None:
    if dist.get_rank() == 1 and state.step == 3:
        raise StopIteration
    state.step += 1
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if dist.get_rank() == 0 and state.step == 3:
        poll_for(flag.exists, what="the flag")
    state.total += int(ones.item())


def work(end: socket.socket, flag: Path) -> None:
    torch.set_num_threads(1)
    final = torchelastic.train(Coordinator(end), partial(train_step, flag), Sum())
    assert (final.step, final.total) == (3, 6)


# --- the tests -----------------------------------------------------------------------------------

#: As `forked` has it: its workers have imported torch.
CONTEXT = multiprocessing.get_context("forkserver")

pytestmark = pytest.mark.usefixtures("forks")


@contextmanager
def pair(flag):
    """The agents of a world of two, until rank 1 has no more data; its workers end well."""
    with store() as port:
        agents, workers = [], []
        for _ in range(2):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                workers.append(CONTEXT.Process(target=work, args=(theirs, flag)))
                workers[-1].start()
            agents.append(FakeAgent(ours, port))
        try:
            for rank, agent in enumerate(agents):
                agent.hear(Enlisted, timeout=60)
                agent.enter(0, rank=rank, size=2)
            for agent in agents:
                agent.hear(Up, timeout=60)
            assert agents[1].hear(Finished) == Finished(0, 3)
            yield agents
            for worker in workers:
                worker.join(60)
                assert worker.exitcode == 0
        finally:
            for agent, worker in zip(agents, workers, strict=True):
                agent.end.close()
                worker.kill()
                worker.join()
                worker.close()


OVER = Over(0, "the training is done", finished=True, through=2)


def test_uneven_end_finishes_the_last_step_and_frees_the_rank_ahead(tmp_path):
    flag = tmp_path / "flag"
    with pair(flag) as agents:
        for agent in agents:
            agent.say(OVER)
        assert agents[1].hear(Stopped) == Stopped(0, 3)
        flag.touch()
        assert agents[0].hear(Stopped) == Stopped(0, 3)


@pytest.mark.parametrize("hears_first", [0, 1])
def test_rank_waiting_for_a_worker_without_data_is_freed(tmp_path, hears_first):
    """Rank 0 waits in a collective. Where its peer hears first, and leaves, it lost a peer."""
    flag = tmp_path / "flag"
    flag.touch()
    with pair(flag) as agents:
        for rank in (hears_first, 1 - hears_first):
            if rank < hears_first:
                assert agents[0].hear(PeerLost).step == 3
            agents[rank].say(OVER)
            assert agents[rank].hear(Stopped) == Stopped(0, 3)
