"""Which hosts are started and which are asked to leave."""

from torchelastic.hosts.host_list import parse_hosts
from torchelastic.hosts.host_plan import (
    ANSWER_TIMEOUT,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STEADY,
    Connect,
    HostState,
    LeaveHost,
    StartAgent,
    all_refused,
    failed,
    plan,
)

A, B, C = HOSTS = parse_hosts(["ada@a:2", "b:2", "c"])
NOW = 100.0


def states(**status):
    targets = {"a": "ada@a", "b": "b", "c": "c"}
    return {
        targets[name]: state if isinstance(state, HostState) else HostState(state, NOW - 1)
        for name, state in status.items()
    }


def test_all_hosts_are_called_and_the_first_that_answers_in_time_founds_the_job():
    assert plan(HOSTS, {}, [], NOW) == [Connect(A), Connect(B), Connect(C)]
    called = states(a=HostState("calling", NOW - ANSWER_TIMEOUT + 1), b="ready", c="calling")
    assert plan(HOSTS, called, [], NOW) == []
    assert plan(HOSTS, called, [], NOW + 1) == [StartAgent(B, ("b",))]


def test_there_is_one_founder_however_slow_it_is():
    founding = states(a="ready", b=HostState("starting", NOW - 1000), c="ready")
    assert plan(HOSTS, founding, [], NOW) == []
    gone = states(a="ready", b=failed(HostState("starting", 0.0), NOW), c="calling")
    assert plan(HOSTS, gone, [], NOW) == [StartAgent(A, ("a",))]


def test_the_others_follow_once_it_runs():
    answered = states(a="running", b="ready", c="ready")
    assert plan(HOSTS, answered, ["ada@a"], NOW) == [
        StartAgent(B, ("a",)),
        StartAgent(C, ("a",)),
    ]


def test_a_job_that_may_run_is_founded_when_all_had_time_to_say_so():
    answered = states(a="ready", b=HostState("calling", NOW - ANSWER_TIMEOUT + 1))
    assert plan((A, B), answered, [], NOW, may_run=True) == []
    late = plan((A, B), answered, [], NOW + 1, may_run=True)
    assert late == [StartAgent(A, ("a",))] == plan((A, B), answered, [], NOW)


def test_a_new_host_looks_for_the_job_where_it_runs():
    running = states(a="ready", b="running", c="running")
    assert plan(HOSTS, running, ["b", "c"], NOW) == [StartAgent(A, ("b", "c"))]
    many = parse_hosts([f"h{number}" for number in range(9)])
    told = plan(many, {"h8": HostState("ready", NOW)}, [h.target for h in many[:8]], NOW)[-1]
    assert told == StartAgent(many[8], ("h0", "h1", "h2"))


def test_a_host_that_failed_waits_for_its_pause():
    gone = failed(HostState("running", NOW - 1), NOW)
    known = {**states(b="running", c="running"), "ada@a": gone}
    assert plan(HOSTS, known, ["b", "c"], NOW + FIRST_PAUSE - 0.1) == []
    assert plan(HOSTS, known, ["b", "c"], NOW + FIRST_PAUSE) == [Connect(A)]


def test_all_hosts_failed_and_meet_where_the_last_one_ran():
    answered = states(a="ready", b="ready")
    assert plan((A, B), answered, ["b"], NOW) == [StartAgent(A, ("b",)), StartAgent(B, ("b",))]


def test_where_the_job_ran_is_forgotten_with_the_hosts_it_ran_on():
    assert plan((C,), states(c="ready"), ["ada@a", "b"], NOW) == [StartAgent(C, ("c",))]


def test_a_host_that_is_not_listed_any_more_leaves_once():
    running = states(a="running", b="running")
    assert plan((B,), running, ["ada@a", "b"], NOW) == [LeaveHost("ada@a")]
    assert plan((B,), states(a="leaving", b="running"), ["b"], NOW) == []
    for status in ("calling", "ready", "starting", "running"):
        assert plan((), states(a=status), ["ada@a"], NOW) == [LeaveHost("ada@a")]


def test_a_host_that_comes_back_is_started_when_it_has_left():
    assert plan(HOSTS, states(a="leaving", b="running", c="running"), ["b", "c"], NOW) == []
    assert plan(HOSTS, states(b="running", c="running"), ["b", "c"], NOW) == [Connect(A)]


def test_pauses_double_until_a_host_runs_steadily():
    state, pauses = HostState("starting", 0.0), []
    for _ in range(10):
        state = failed(state, NOW)
        pauses.append(state.retry_at - NOW)
        state = HostState("running", NOW - 1, state.failures)
    assert pauses[:4] == [5, 10, 20, 40]
    assert pauses[-1] == LONGEST_PAUSE
    steady = HostState("running", NOW - STEADY - 1, 7)
    assert failed(steady, NOW).failures == 1


def test_a_job_that_every_host_refuses_cannot_run():
    refused = failed(HostState("starting", 0.0), NOW, refused=True)
    assert all_refused((A, B), states(a=refused, b=refused))
    assert not all_refused((A, B), states(a=refused, b="calling"))
    assert not all_refused((A, B), states(a=refused))
    assert not all_refused((), {})
