import math

import pytest

import torchelastic
from torchelastic.errors import ConfigError
from torchelastic.training.step_guard import (
    Guard,
    GuardConfig,
    GuardHistory,
    Window,
    judge,
    response,
)

CONFIG = GuardConfig(window=8, min_steps=4, limit=3)
NORMS, LOSSES = (1.0, 1.1, 0.9, 1.2, 1.0), (2.0, 2.1, 1.9, 2.2, 2.0)
SEEN = Window(NORMS, LOSSES)


@pytest.mark.parametrize(
    ("window", "norm", "loss", "reason"),
    [
        (SEEN, 1.0, 2.0, ""),
        (SEEN, 1.0, None, ""),
        (SEEN, math.nan, 2.0, "the gradient is not finite"),
        (Window(), math.inf, None, "the gradient is not finite"),
        (Window(), 1.0, math.nan, "the loss is not finite"),
        (SEEN, 1.0, -math.inf, "the loss is not finite"),
        # 1.4826 * median of the deviations of the logarithm is 0.14
        (SEEN, 3.9, 2.0, ""),
        (SEEN, 4.2, 2.0, "the norm of the gradient is a spike"),
        (SEEN, 0.0, 2.0, ""),
        (SEEN, 1.0, 5.4, ""),
        (SEEN, 1.0, 5.5, "the loss is a spike"),
        # Not all losses were positive: no logarithms.
        (Window(NORMS, (-2.0, -2.1, -1.9, -2.2, -2.0)), 1.0, -0.1, ""),
        (Window(NORMS, (-2.0, -2.1, -1.9, -2.2, -2.0)), 1.0, 0.1, "the loss is a spike"),
        # Near the end of a training losses spread over orders of magnitude.
        (Window(NORMS, (0.01, 0.1, 0.003, 0.3, 0.03)), 1.0, 2.3, ""),
        (SEEN, 1.0, -9.0, ""),
        # Too few steps.
        (Window(NORMS[:3], LOSSES[:3]), 1e9, 1e9, ""),
        # A value like this was good before.
        (Window((*NORMS, 50.0), LOSSES), 49.0, None, ""),
        # Constant values have no deviation of their own.
        (Window((1.0,) * 8, (1.0,) * 8), 2.7, 1.9, ""),
        (Window((1.0,) * 8, (1.0,) * 8), 2.8, 1.0, "the norm of the gradient is a spike"),
        (Window((1.0,) * 8, (1.0,) * 8), 1.0, 2.8, "the loss is a spike"),
        # All gradients were zero: nothing to compare with.
        (Window((0.0,) * 8), 1.0, None, ""),
    ],
)
def test_judge_finds_values_that_are_not_finite_and_spikes(window, norm, loss, reason):
    assert judge(window, norm, loss, CONFIG).reason == reason


def test_judge_without_spike_finds_only_values_that_are_not_finite():
    config = GuardConfig(spike=None)
    assert judge(SEEN, 1e30, 1e30, config).reason == ""
    assert judge(SEEN, math.nan, None, config).reason == "the gradient is not finite"


@pytest.mark.parametrize(
    ("action", "bad", "step", "expected"),
    [
        ("skip", (), 7, "skip"),
        ("stop", (), 7, "stop"),
        ("retry", (), 7, "retry"),
        ("retry", (6,), 7, "retry"),
        ("retry", (7,), 7, "skip"),
        ("skip", (5, 6), 7, "stop"),
        ("skip", (0, 6), 9, "skip"),
        # The repetition of a step is not another bad step.
        ("retry", (6, 7), 7, "skip"),
    ],
)
def test_response_counts_the_bad_steps_of_the_window(action, bad, step, expected):
    assert response(action, bad, step, CONFIG) == expected


def test_window_keeps_the_latest_values():
    window = SEEN.with_values(7.0, None, 5)
    assert window == Window((1.1, 0.9, 1.2, 1.0, 7.0), LOSSES)


def test_guard_state_is_the_same_after_a_round_trip():
    guard, other = torchelastic.Guard(), Guard()
    guard.history = GuardHistory((SEEN, Window()), (3, 4), 4)
    other.load_state_dict(guard.state_dict())
    assert other.history == guard.history


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_bad": "rewind"}, "on_bad must be one of skip, retry, stop"),
        ({"spike": 0.0}, "spike must be above 0"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"window": 10, "min_steps": 11}, "larger than the window"),
    ],
)
def test_guard_refuses_settings_that_make_no_sense(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Guard(**arguments)
