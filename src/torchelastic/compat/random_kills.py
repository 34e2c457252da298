"""Random self-kills of a process, as in 0.1. For faults at exact places, see `faults`."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading

from torchelastic.errors import ConfigError

log = logging.getLogger(__name__)


def start_fault_injection_thread(
    fault_injection_rate: float, interval_in_sec: float
) -> threading.Thread:
    """Every `interval_in_sec` seconds, SIGKILL this process with this probability (0 to 1)."""
    if not 0 <= fault_injection_rate <= 1:
        raise ConfigError(
            f"fault_injection_rate is {fault_injection_rate}: it must be a probability, 0 to 1."
        )
    thread = threading.Thread(
        target=_strike_sometimes,
        args=(fault_injection_rate, interval_in_sec),
        name="torchelastic-fault-injection",
        daemon=True,
    )
    thread.start()
    return thread


def _strike_sometimes(rate: float, interval: float) -> None:
    # Not the global generator: the training's random numbers must not depend on it.
    chance = random.SystemRandom()
    never = threading.Event()
    while not never.wait(interval):
        if chance.random() < rate:
            log.warning("Injecting a fault: this process kills itself.")
            os.kill(os.getpid(), signal.SIGKILL)
