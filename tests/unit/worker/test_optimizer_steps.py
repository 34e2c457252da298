"""Steps of scripts that tell none: which are counted, from where on, and by whom."""

import os
import sys
from types import SimpleNamespace

import pytest

from torchelastic.worker import optimizer_steps, status_page
from torchelastic.worker.optimizer_steps import MIXED, UNKNOWN, Counter, steps_before
from torchelastic.worker_counters import stalls


class Torch:
    """Torch, as far as it calls hooks."""

    def __init__(self):
        self.after, self.before = {}, {}
        self.register_optimizer_step_post_hook = lambda hook: self._add(self.after, hook)
        self.register_optimizer_step_pre_hook = lambda hook: self._add(self.before, hook)

    def _add(self, hooks, hook):
        number = len(hooks)
        hooks[number] = hook
        return SimpleNamespace(remove=lambda: hooks.pop(number))

    def step(self, optimizer):
        """As torch does: who adds or removes a hook meanwhile ends it with an error."""
        for hook in self.before.values():
            assert hook(optimizer, (), {}) is None
        for hook in self.after.values():
            assert hook(optimizer, (), {}) is None


class Parameter:
    requires_grad = True

    def __init__(self):
        self.hooks = []

    def register_post_accumulate_grad_hook(self, hook):
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))


def optimizer(*parameters, **state):
    kept = {number: {name: value} for number, (name, value) in enumerate(state.items())}
    return SimpleNamespace(state=kept, param_groups=[{"params": list(parameters)}])


@pytest.fixture
def handed(monkeypatch):
    """The memory that the agent gets, made by the first step."""
    made = []

    def hand_over():
        made.append(status_page.create())
        return status_page.StatusPage(made[-1])

    monkeypatch.setattr(optimizer_steps, "_create_status_page", hand_over)
    yield made
    for descriptor in made:
        os.close(descriptor)


@pytest.fixture
def torch():
    return Torch()


@pytest.fixture
def counter(torch):
    made = Counter()
    made.hook(torch)
    return made


#: Which optimizer steps, one after the other; how many steps that is, and of how many before.
ORDERS = {
    "one": ("aaaa", 4, UNKNOWN),
    "in turn, as in a GAN": ("abababa", 4, UNKNOWN),
    "in turn, one more often": ("aabaabaab", 6, UNKNOWN),
    "one for each layer": ("abcdabcdabcd", 3, UNKNOWN),
    "one inside of another": ("ababab", 3, UNKNOWN),
    "the first one less often": ("abbbabbb", 6, MIXED),
    "one after another": ("aaabbbbb", 7, MIXED),
}


@pytest.mark.parametrize(("order", "steps", "before"), ORDERS.values(), ids=ORDERS)
def test_step_is_counted_across_optimizers(order, steps, before, counter, torch, handed):
    optimizers = {name: optimizer() for name in "abcd"}
    for name in order:
        torch.step(optimizers[name])
    [descriptor] = handed
    assert status_page.read(descriptor).step == steps
    assert status_page.read_taken(descriptor) == before
    assert status_page.read_first_step(descriptor) == 1


BEFORE = {
    "Adam, just begun": (optimizer(step=1.0), 0),
    "Adam, whose state was loaded": (optimizer(momentum=2.0, step=51.0), 50),
    "SGD": (optimizer(momentum=2.0), UNKNOWN),
    "no state at all": (SimpleNamespace(), UNKNOWN),
    "something else": (optimizer(step="many"), UNKNOWN),
}


@pytest.mark.parametrize(("stepped", "expected"), BEFORE.values(), ids=BEFORE)
def test_how_many_steps_there_were_before(stepped, expected):
    assert steps_before(stepped) == expected


def test_steps_go_on_where_the_state_that_was_loaded_ends(counter, torch, handed):
    adam = optimizer(step=51.0)
    for _ in range(3):
        torch.step(adam)
    assert (status_page.read(handed[0]).step, status_page.read_taken(handed[0])) == (53, 50)


def test_a_cuda_graph_that_is_recorded_is_left_alone(monkeypatch):
    class Step:
        is_cuda = True

        def __int__(self):
            raise AssertionError("it was read")

    capturing = SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=capturing))
    assert steps_before(optimizer(step=Step())) == UNKNOWN


def test_wait_after_last_gradient_is_not_own_time(counter, torch, handed, monkeypatch):
    monkeypatch.setattr(stalls, "seconds", stalls.seconds[:])
    first, middle, last = Parameter(), Parameter(), Parameter()
    one = optimizer(first, middle, last)
    torch.step(one)
    assert [len(each.hooks) for each in (first, middle, last)] == [1, 0, 1]
    first.hooks[0](first)
    torch.step(one)
    assert 0 < stalls.apart(stalls.seconds) < 60


def test_a_script_that_tells_its_steps_is_not_counted_twice(counter, torch, handed):
    parameter = Parameter()
    torch.step(optimizer(parameter))
    counter.stop()
    assert (torch.after, torch.before, parameter.hooks) == ({}, {}, [])


def test_a_process_that_is_no_worker_counts_nothing(counter, torch, monkeypatch):
    asked = []
    monkeypatch.setattr(optimizer_steps, "_create_status_page", lambda: asked.append(1))
    for _ in range(3):
        torch.step(optimizer())
    assert asked == [1]


def test_error_in_step_counter_does_not_stop_training(counter, torch, monkeypatch):
    asked = []

    def fail():
        asked.append(1)
        raise OSError("no memory")

    monkeypatch.setattr(optimizer_steps, "_create_status_page", fail)
    for _ in range(3):
        torch.step(optimizer())
    assert asked == [1]


def test_torch_is_hooked_once_when_the_script_has_imported_it(monkeypatch, torch):
    """And not while it is being imported; nor is it imported for us."""
    monkeypatch.setattr(optimizer_steps, "_counter", Counter())
    monkeypatch.setattr(optimizer_steps, "_is_decided", False)
    monkeypatch.setattr(optimizer_steps, "_turns", iter(range(9)))
    monkeypatch.delitem(sys.modules, "torch.optim.optimizer", raising=False)
    optimizer_steps.look()
    assert "torch.optim.optimizer" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", SimpleNamespace())
    optimizer_steps.look()
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", torch)
    optimizer_steps.look()
    optimizer_steps.look()
    assert len(torch.after) == 1
    optimizer_steps.stop()
    assert torch.after == {}
