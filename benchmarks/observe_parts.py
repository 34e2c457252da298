"""What is done in a step so that it can be seen, part by part: processor time, or for strace.

    observe_parts.py time REPETITIONS      a line of JSON: nanoseconds of each part, by repetition
    observe_parts.py trace                 a line on stderr before and after the steps of each part

Parts that this version of torchelastic does not have are left out.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from torchelastic import metrics
from torchelastic.agent.telemetry.progress_sampler import ProgressSampler
from torchelastic.clock import SystemClock
from torchelastic.events.analysis.goodput import GoodputFold
from torchelastic.events.log import EventLog
from torchelastic.metrics import reporting
from torchelastic.metrics.metric_table import MetricTable
from torchelastic.worker import status_page
from torchelastic.worker_counters import stalls

Step = Callable[[int], None]

#: Of a part, at a time; and looks of the agent's, which are longer.
STEPS, LOOKS = 5000, 100
NOTHING, AGAIN = "nothing", "nothing, again"
#: What a step of `torchelastic.train` is made of, of a script that keeps its state, and of another.
TRAIN = ("how far it is", "what it stood still for", "its collectives", "two metrics")
SCRIPT = ("how far it is", "what it stood still for", "its own time", "two metrics")
PLAIN = ("its optimizer's step",)
WORKERS = (2, 64)


def nothing(number: int) -> None:
    """What a loop costs by itself."""


def of_a_worker(shown: status_page.StatusPage) -> dict[str, Step]:
    """The parts of a step."""
    shown.rank = 0
    found: dict[str, Step] = {NOTHING: nothing, AGAIN: nothing}

    def entered(number: int) -> None:
        shown.entered(0, number)

    def stood_still(number: int) -> None:
        stalls.add("data", 0.001)
        with stalls.Counted("snapshot"):
            pass

    found |= {"how far it is": entered, "what it stood still for": stood_still}
    made = (
        ("its collectives", collectives),
        ("its own time", own_time),
        ("its optimizer's step", counted),
    )
    for name, make in made:
        if (step := make(shown)) is not None:
            found[name] = step
    return found | {"two metrics": two_metrics()}


def collectives(shown: Any) -> Step | None:
    """Of a small model: one of DDP and one of the script's, both waited for."""
    if not hasattr(shown, "collectives"):
        return None
    there, mark = shown.collectives, (0, 7, b"ALLREDUCE")
    there.enter(0)
    there.row_of("0")

    def step(number: int) -> None:
        for order in (2 * number, 2 * number + 1):
            there.launched(order, *mark)
            began = time.monotonic()
            there.waits(*mark)
            stalls.add("peers", time.monotonic() - began)
            there.goes_on()

    return step


def own_time(shown: object) -> Step | None:
    """What is noted of a script's backward, which has no collective of ours."""
    try:
        from torchelastic.worker.backward_waits import BackwardWaits
    except ImportError:
        return None
    waits, gradient = BackwardWaits(()), Any

    def step(number: int) -> None:
        waits._ready(gradient)
        waits._ready(gradient)
        waits.before_write()
        waits.committed()

    return step


def counted(shown: Any) -> Step | None:
    """What torch calls in a step of a plain script: for two gradients, before the optimizer's step
    and after it."""
    import torch._dynamo  # noqa: F401, which every script with an optimizer has imported

    try:
        from torchelastic.worker.backward_waits import BackwardWaits
        from torchelastic.worker.optimizer_steps import Counter, _hidden
    except ImportError:
        return None
    counter, waits, optimizer = Counter(), BackwardWaits(()), SimpleNamespace()
    counter._status_page, counter._waits, counter._counted = shown, waits, id(optimizer)
    counter._note, before_write = _hidden(counter._count), _hidden(counter._before_write)

    def step(number: int) -> None:
        waits._ready(optimizer)
        waits._ready(optimizer)
        before_write(optimizer, (), {})
        counter.stepped(optimizer, (), {})

    return step


def two_metrics() -> Step:
    """The loss and one more, with the board that an agent would have been handed."""
    reporting._table, reporting._connected = MetricTable(), True

    def step(number: int) -> None:
        metrics.put_metric("loss", 0.5)
        metrics.put_metric("accuracy", 0.25)

    return step


def of_the_agent(directory: Path) -> dict[str, Step]:
    """A look at the workers of a node, all of whom have got on, and what is written of it."""
    return {f"the agent looks at {count}": look(directory, count) for count in WORKERS}


def look(directory: Path, count: int) -> Step:
    clock = SystemClock()
    log = EventLog(directory / f"{count}.jsonl", job="job", node="node", clock=clock)
    log.listen(GoodputFold().feed)
    sampling = ProgressSampler(
        lambda generation, event: log.emit(event, generation=generation), clock
    )
    status_pages = [status_page.StatusPage(status_page.create()) for _ in range(count)]
    for rank, one in enumerate(status_pages):
        one.rank = rank

    def step(number: int) -> None:
        for one in status_pages:
            one.entered(0, number)
        sampling.look([status_page.read(one._descriptor) for one in status_pages])

    return step


def nanoseconds(step: Step, count: int) -> float:
    """Processor time of this thread for one of so many."""
    began = time.thread_time_ns()
    for number in range(count):
        step(number)
    return (time.thread_time_ns() - began) / count


def measure(parts: dict[str, Step], count: int, repetitions: int) -> dict[str, list[float]]:
    """All parts in turn, every other time in reverse order."""
    found: dict[str, list[float]] = {name: [] for name in parts}
    for repetition in range(repetitions):
        names = list(parts) if repetition % 2 else list(reversed(parts))
        for name in names:
            found[name].append(nanoseconds(parts[name], count))
    return found


def trace(parts: dict[str, Step]) -> None:
    """For who looks on: the same steps between two lines."""
    for name, step in parts.items():
        os.write(2, f"begin {name}\n".encode())
        for number in range(STEPS):
            step(number)
        os.write(2, f"end {name}\n".encode())


def main() -> None:
    gc.disable()
    parts = of_a_worker(status_page.StatusPage(status_page.create()))
    for step in parts.values():
        nanoseconds(step, 200)  # what is made at the first time is made
    if sys.argv[1] == "trace":
        trace(parts)
        return
    repetitions = int(sys.argv[2])
    with TemporaryDirectory() as directory:
        agent = of_the_agent(Path(directory))
        found = SimpleNamespace(
            step=measure(parts, STEPS, repetitions), agent=measure(agent, LOOKS, repetitions)
        )
    print(json.dumps(vars(found)))


if __name__ == "__main__":
    main()
