"""Launcher nodes of one job in the threads of this process: the worlds that a launcher sees."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.ports import free_port
from tests.support import poll_for
from torchelastic.compat.torchrun.launcher_node import LauncherNode
from torchelastic.compat.torchrun.torchrun_flags import launch_config
from torchelastic.config import parse_endpoint
from torchelastic.errors import JobClosed, RendezvousLost
from torchelastic.rendezvous import (
    RendezvousClosedException,
    RendezvousParameters,
    RendezvousTimeoutException,
    get_rendezvous_handler,
)
from torchelastic.worker import worker_stores


@pytest.fixture(scope="module", autouse=True)
def a_store_before():
    """The first one in a process makes a pipe that the process keeps."""
    worker_stores.serve()


class Nodes:
    """Launcher nodes that meet at one endpoint, each with a thread in place of its launcher's.

    Two at least, or all there may be: the first one does not begin alone, however long it takes
    the second to come.
    """

    def __init__(self, nodes=(2, 3), **conf):
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.config = launch_config(
            self.endpoint, "job", nodes, {"last_call_timeout": 0.3, "timeout": 60, **conf}
        )
        self.launchers = []
        self.calls = ThreadPoolExecutor(8)

    def join(self):
        """Join as another node; the first one hosts the rendezvous."""
        launcher = LauncherNode(self.config, "the test")
        self.launchers.append(launcher)
        call = self.calls.submit(launcher.next_world)
        poll_for(self.is_served, what="the first node hosts")
        return launcher, call

    def is_served(self):
        with socket.socket() as sock:
            return sock.connect_ex(parse_endpoint(self.endpoint)) == 0

    def ask_again(self, *launchers):
        """Ask again, as launchers do that have stopped their workers."""
        return [self.calls.submit(launcher.next_world) for launcher in launchers]

    def end(self, ending, *launchers):
        """Together: each waits for the others."""
        return [
            call.result(30) for call in [self.calls.submit(g.end, ending, "") for g in launchers]
        ]


@pytest.fixture
def nodes():
    made = []
    with ExitStack() as stack:

        def make(*arguments, **conf):
            made.append(Nodes(*arguments, **conf))
            stack.callback(made[-1].calls.shutdown)
            return made[-1]

        yield make
        for job in made:
            for launcher in reversed(job.launchers):  # the host last
                launcher.end("left", "the test is over")


def told(launcher):
    poll_for(launcher.must_stop, what="the launcher is told to stop its workers")


def both_in(nodes):
    """Two nodes in a world."""
    (first, one), (second, two) = nodes.join(), nodes.join()
    return first, second, [one.result(30), two.result(30)]


def test_nodes_get_one_place_each_and_a_store_they_share(nodes):
    _, _, entered = both_in(nodes())

    assert sorted(place.node_rank for place in entered) == [0, 1]
    assert [place.nodes for place in entered] == [2, 2]
    assert len({place.master_port for place in entered}) == 1
    entered[0].store.set("word", "said")
    assert entered[1].store.get("word") == b"said"


def test_a_node_whose_workers_ended_brings_all_to_a_new_store(nodes):
    job = nodes()
    first, second, before = both_in(job)

    again = job.ask_again(first)
    told(second)
    again += job.ask_again(second)
    after = [call.result(30) for call in again]

    assert {place.generation for place in after} == {before[0].generation + 1}
    assert after[0].master_port != before[0].master_port
    assert not after[0].store.check(["word"])
    assert [place.node_rank for place in after] == [place.node_rank for place in before]


def test_the_job_ends_when_all_have_succeeded(nodes):
    job = nodes()
    first, second, entered = both_in(job)

    # As torchrun's barrier does it before it calls `shutdown`.
    assert entered[0].store.add("torchelastic/agent/terminal_state/num_members", 1) == 1
    assert not second.must_stop()

    assert job.end("done", first, second) == [True, True]
    assert (first.is_closed, second.is_closed) == (True, True)


def test_a_launcher_that_gives_up_ends_the_job_for_all(nodes):
    job = nodes()
    first, second, _ = both_in(job)

    ending = job.calls.submit(second.end, "failed", "no restart is left")
    told(first)
    (again,) = job.ask_again(first)

    with pytest.raises(JobClosed, match="no restart is left"):
        again.result(30)
    assert ending.result(30) is True


def test_a_host_that_does_not_come_is_reported_by_everything(nodes):
    conf = {"timeout": 0.3, "is_host": 0}
    launcher = LauncherNode(launch_config(nodes().endpoint, "job", (1, 2), conf), "the test")

    with pytest.raises(RendezvousLost, match="No rendezvous answered"):
        launcher.next_world()
    with pytest.raises(RendezvousLost):
        launcher.must_stop()
    assert launcher.end("left", "") is False


def test_a_handler_of_release_0_2_is_a_node():
    params = RendezvousParameters("c10d", f"127.0.0.1:{free_port()}", "job", 1, 1, timeout=30)
    handler = get_rendezvous_handler(params)

    store, rank, size = handler.next_rendezvous()
    store.set("word", "said")

    assert (store.get("word"), rank, size) == (b"said", 0, 1)
    assert (handler.num_nodes_waiting(), handler.is_closed()) == (0, False)
    assert handler.shutdown() is True
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedException):
        handler.next_rendezvous()


def test_launcher_node_errors_have_the_names_of_release_0_2():
    params = RendezvousParameters("c10d", f"127.0.0.1:{free_port()}", "job", 2, 2, timeout=1)
    handler = get_rendezvous_handler(params)

    with pytest.raises(RendezvousTimeoutException, match="waiting for nodes"):
        handler.next_rendezvous()
    handler.shutdown()
