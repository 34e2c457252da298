"""The control thread and its link: who is told what, and when."""

import json
import os
import socket
import threading

import pytest

from tests.support import poll_for
from tests.unit.worker.entering import enter
from torchelastic.errors import ChannelLost, JobClosed, SnapshotError
from torchelastic.snapshot import messages
from torchelastic.training import control as control_module
from torchelastic.training.control import Control, InProcessRequests
from torchelastic.training.group.abortable_waits import GenerationOver
from torchelastic.worker import channel, orders, status_page
from torchelastic.worker.orders import Closed, Over, Ping, Pong, Stopped


class Group:
    """Something to be aborted."""

    def __init__(self, pending=0):
        self.pending, self.reasons, self.looks = pending, [], []

    def abort(self, reason):
        self.reasons.append(reason)

    def show(self):
        pass

    def look(self, silence):
        self.looks.append(silence)

    @property
    def aborted(self):
        return bool(self.reasons)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def agent(ends):
    return ends[0]


@pytest.fixture
def control(ends):
    made = Control(channel.WorkerLink(ends[1]))
    made.start()
    yield made
    made.stop()


def say(agent, order, *descriptors):
    socket.send_fds(agent, [json.dumps(orders.to_json(order)).encode()], descriptors)


def hear(agent):
    return orders.from_json(json.loads(agent.recv(channel.LIMIT)))


def test_a_ping_says_what_is_waited_for(agent, control):
    say(agent, Ping())
    assert hear(agent) == Pong(waiting=False)
    group = Group(pending=2)
    control.guard(0, group)
    say(agent, Ping())
    assert hear(agent) == Pong(waiting=True, aborted=False)
    group.abort("")
    say(agent, Ping())
    assert hear(agent) == Pong(waiting=True, aborted=True)


def test_control_aborts_the_group_when_its_world_ends(agent, control):
    say(agent, enter(0))
    control.next()
    group = Group()
    control.guard(0, group)
    say(agent, Over(0, "node b is lost"))
    assert control.next() == Over(0, "node b is lost")
    poll_for(lambda: group.aborted, what="the abort")
    assert group.reasons == ["node b is lost"]
    assert control.is_over(0)


def test_control_aborts_a_group_guarded_after_the_end_at_once(agent, control):
    say(agent, Over(3, "too late"))
    control.next()
    group = Group()
    control.guard(3, group)
    assert group.reasons == ["too late"]
    later = Group()
    control.guard(4, later)
    assert not later.aborted


@pytest.mark.parametrize("closing", ["agent", "job"])
def test_when_there_will_be_no_more_orders(agent, control, closing):
    group = Group()
    control.guard(0, group)
    if closing == "agent":
        agent.close()
    else:
        say(agent, Closed("The budget is spent."))
    with pytest.raises(ChannelLost if closing == "agent" else JobClosed):
        control.next()
    poll_for(lambda: group.aborted, what="the abort")


def test_an_order_that_cannot_be_read_does_not_leave_the_training_waiting(agent, control):
    agent.send(b"no json")
    with pytest.raises(ChannelLost, match="cannot be read"):
        control.next()


def test_a_forked_child_does_not_speak_and_may_end(agent, control):
    child = os.fork()
    if child == 0:
        try:
            control.tell(Stopped(0, 0))
        except ChannelLost:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    say(agent, Ping())
    assert hear(agent) == Pong(waiting=False)


def test_control_dumps_the_stacks_of_all_threads(agent, control):
    descriptor = os.memfd_create("stacks")
    say(agent, orders.Dump(), descriptor)
    say(agent, Ping())
    assert hear(agent) == Pong(waiting=False)  # one by one: it is written
    text = os.pread(descriptor, 1 << 16, 0).decode()
    os.close(descriptor)
    assert "test_control_dumps_the_stacks" in text
    assert "_hear" in text


@pytest.fixture
def link(ends):
    made = channel.WorkerLink(ends[1].dup())
    yield made
    made.close()


def test_an_agent_that_takes_nothing_is_an_error_after_a_while(link):
    for _ in range(10_000):
        if not link._sent(b"x" * 1000, ()):
            break
    with pytest.raises(ChannelLost, match="accepted no message for"):
        link.tell({}, timeout=0.01)


def test_a_message_waits_for_room(ends, link):
    sender = threading.Thread(target=lambda: [link.tell({"n": n}) for n in range(2000)])
    sender.start()
    assert [json.loads(ends[0].recv(100))["n"] for _ in range(2000)] == [*range(2000)]
    sender.join()


def test_an_agent_that_is_gone_is_an_error(ends, link):
    ends[0].close()
    with pytest.raises(ChannelLost, match="could not send"):
        link.tell({})
    with pytest.raises(ChannelLost, match="gone"):
        link.receive()


def test_while_the_agent_is_quiet_it_looks_for_peers_that_do_not_answer(
    agent, control, monkeypatch
):
    monkeypatch.setattr(control_module, "LOOK", 0.01)
    group, look, quiet = Group(pending=1), control._look, []
    monkeypatch.setattr(control, "_look", lambda: (look(), quiet.append(None)))
    control.guard(0, group)
    poll_for(lambda: quiet, what="a quiet moment")
    assert group.looks == [], "it does not know yet for how long"
    descriptor = status_page.create()
    say(agent, orders.StatusPage(2.5), descriptor)
    os.close(descriptor)
    poll_for(lambda: len(group.looks) > 1, what="several looks")
    assert set(group.looks) == {2.5}


def ask(control, generation=0):
    """Ask for memory in a thread; return where its answer, or the error, will be."""
    found = []

    def run():
        try:
            found.append(InProcessRequests(control, generation).request_memory("shard:0", 8, 8))
        except Exception as error:
            found.append(error)

    threading.Thread(target=run).start()
    return found


def test_answers_about_snapshots_go_to_the_thread_that_asked(agent, control):
    found = ask(control)
    request = messages.from_json(json.loads(agent.recv(channel.LIMIT)))
    assert request == messages.Room(1, "shard:0", 8, 8)
    refused = messages.to_json(messages.Refused(request.request, "no room"))
    late = messages.to_json(messages.Refused(99, "of a request that was given up"))
    for answer in (late, refused):
        agent.send(json.dumps(answer).encode())
    poll_for(lambda: found, what="the answer")
    assert isinstance(found[0], SnapshotError)
    assert str(found[0]) == "no room"


def test_control_ends_a_request_when_its_world_ends(agent, control):
    say(agent, enter(generation=0))
    found = ask(control)
    agent.recv(channel.LIMIT)
    assert not found
    say(agent, Over(0, "a node is lost"))
    poll_for(lambda: found, what="the end of the wait")
    assert isinstance(found[0], GenerationOver)
    again = ask(control, generation=1)
    request = messages.from_json(json.loads(agent.recv(channel.LIMIT)))
    assert request.request == 2, "a late answer to the first request is not taken for its own"
    agent.send(json.dumps(messages.to_json(messages.Refused(2, "no room"))).encode())
    poll_for(lambda: again, what="the answer")
