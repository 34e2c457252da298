"""The rows of `guard.py` about steps with bad numbers, flipped bits, cost and false alarms."""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.process.jobs import HERE, job
from torchelastic.training.step_guard import Guard
from torchelastic.training.step_judge import StepJudge
from torchelastic.training.torch_state import TorchState

RUNS, PATIENCE = 50, 300.0
#: The most of a step that the guard may take, and the steps' seconds by millions of parameters.
COST, STEPS = 0.005, {1: 0.025, 25: 0.7}
#: A row's run: what was done, its seconds, what was wrong, and for the report: found and wanted.
Found = dict[str, Any]


# --- whole jobs -----------------------------------------------------------------------------------


def _ended(script: str, workers: int, **keys: Any) -> tuple[dict[int, str], Any]:
    """The hashes of a job of the tests in the end, by rank, and its events."""
    directory = Path(tempfile.mkdtemp(prefix="guard-"))
    try:
        with job(directory / "job", "--nnodes=1 --max-restarts=0", HERE / script) as made:
            node = made.start(f"--nproc-per-node={workers}", ledger=directory / "ledger", **keys)
            if node.wait(PATIENCE) != 0:
                raise RuntimeError(made.said())
            events = node.events()
        lines = enumerate(made.lines(event="done"))
        return {line.get("rank", number): line["digest"] for number, line in lines}, events
    finally:
        shutil.rmtree(directory)


def _nan(number: int) -> str:
    """A NaN in a random place; return what was wrong about the end."""
    chosen = random.Random(number)
    model = chosen.choice(["plain", "gan", "fixed", "local"])
    rank, step = chosen.randrange(4), chosen.randrange(12)
    place = chosen.randrange(2) if model == "gan" else 0
    keys = {"model": model, "steps": 12, "samples": 96, "loss": chosen.randrange(2)}
    expected, _ = _ended("bad_steps.py", 4, known=step, **keys)
    found, events = _ended("bad_steps.py", 4, bad=f"{rank}:{step}:nan:{place}", **keys)
    skipped = {one["step"] - 1 for one in events if one["type"] == "step-skipped"}
    where = f"{model}, rank {rank}, step {step}, place {place}"
    if skipped != {step}:
        return f"{where}: skipped {skipped}"
    return "" if found == expected else f"{where}: other bits"


def _flip(number: int) -> str:
    """A flipped bit, or the same bit of two elements, on one of three workers."""
    chosen = random.Random(number)
    rank, step = chosen.randrange(3), chosen.randrange(6, 14)
    kind, tensor, bit = chosen.choice(["parameter", "state"]), chosen.randrange(4), 20
    elements = chosen.sample(range(16), 1 + number % 2)
    place = ":".join(map(str, (rank, step, kind, tensor, bit, *elements)))
    keys = {"steps": 17, "check": 5}
    expected, _ = _ended("fixed_batches.py", 1, **keys)
    found, events = _ended("fixed_batches.py", 3, flip=place, **keys)
    named = [one["ranks"] for one in events if one["type"] == "states-differed"]
    if named != [[rank]]:
        return f"{place}: named {named}"
    return "" if set(found.values()) == set(expected.values()) else f"{place}: other bits"


def nan(quick: bool) -> Iterator[Found]:
    """A NaN on one of four workers."""
    return _jobs(_nan, quick)


def flips(quick: bool) -> Iterator[Found]:
    """A flipped bit, or two, in the state of one of three workers."""
    return _jobs(_flip, quick)


def _jobs(one: Callable[[int], str], quick: bool) -> Iterator[Found]:
    for number in range(2 if quick else RUNS):
        began = time.monotonic()
        note = one(number)
        what = "jobs with the bits of an undisturbed one"
        taken = round(time.monotonic() - began, 1)
        yield {"what": what, "seconds": taken, "note": note, "wanted": "all", "met": not note}


# --- in this process ------------------------------------------------------------------------------


def _scripts_steps(
    model: nn.Module, loss_of: Callable[[nn.Module, int], torch.Tensor], steps: int
) -> Iterator[Guard]:
    """The steps of a script with warm-up and a schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=steps // 20)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, fall], [steps // 20])
    guard = Guard()
    state = TorchState(model=model, optimizer=optimizer, scheduler=schedule, guard=guard)
    state.restore()
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        guard.loss(loss)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        state.commit()
        yield guard


class Tokens(nn.Module):
    """A small transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.embedding(tokens)))
        return found


def _tokens(model: nn.Module, step: int) -> torch.Tensor:
    """Sequences in which each token follows from the one before, most of the time."""
    first = torch.randint(32, (8, 1))
    tokens = (first + 3 * torch.arange(16)) % 32
    tokens = torch.where(torch.rand(8, 16) < 0.1, torch.randint(32, (8, 16)), tokens)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _images(model: nn.Module, step: int) -> torch.Tensor:
    kinds = torch.randint(4, (16,))
    images = torch.randn(16, 1, 12, 12) + kinds.view(-1, 1, 1, 1)
    return nn.functional.cross_entropy(model(images), kinds)


def _sequences(model: nn.Module, step: int) -> torch.Tensor:
    times = torch.rand(8, 1, 1) * 6 + torch.arange(20).view(1, -1, 1) / 3
    values = torch.sin(times) + 0.1 * torch.randn(8, 20, 1)
    return nn.functional.mse_loss(model(values[:, :-1])[0], values[:, 1:].expand(-1, -1, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor]]] = {
    "transformer": (Tokens, _tokens),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(800, 4),
        ),
        _images,
    ),
    "lstm": (lambda: nn.LSTM(1, 8, 2, batch_first=True, dropout=0.2), _sequences),
}


def alarms(quick: bool) -> Iterator[Found]:
    """Steps of small models that are called bad although nothing is."""
    steps = 500 if quick else 10_000
    for name, (make, loss_of) in MODELS.items():
        torch.manual_seed(0)
        began = time.monotonic()
        bad: tuple[int, ...] = ()
        for guard in _scripts_steps(make(), loss_of, steps):
            bad = (*bad, *(one for one in guard.history.bad if one not in bad))
        yield {
            "what": f"{name}: steps called bad, of {steps}",
            "seconds": round(time.monotonic() - began, 1),
            "note": f"steps {bad}" if bad else "",
            "found": str(len(bad)),
            "wanted": "none",
            "met": not bad,
        }


def _wide(model: nn.Module, step: int) -> torch.Tensor:
    found: torch.Tensor = model(torch.ones(1, next(model.parameters()).shape[1]))
    return found.square().mean()


#: The methods of a `StepJudge` that each step calls; none calls another.
METHODS = ("begin", "_after_backward", "_look", "_take_loss", "before_write", "after_step", "end")


def cost(quick: bool) -> Iterator[Found]:
    """The thread's CPU seconds inside the guard's methods, as in `train`: a script also saves what
    a step is undone by, which `train` does anyway."""
    spent = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            found = method(*arguments)
            spent += time.thread_time() - began
            return found

        return call

    for name in METHODS:
        setattr(StepJudge, name, timed(getattr(StepJudge, name)))
    torch.set_num_threads(1)
    for millions, seconds in STEPS.items():
        width = round((millions * 1e6 / 24) ** 0.5)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(24)))
        taken: list[float] = []
        for _ in _scripts_steps(model, _wide, 20 if quick else 100):
            taken.append(spent)
            spent = 0.0
        own = statistics.median(taken[len(taken) // 2 :])
        shown = f"{1000 * own:.2f} ms, {own / seconds:.2%} of {1000 * seconds:g} ms"
        yield {
            "what": f"{millions} M parameters: CPU time",
            "seconds": own,
            "note": "",
            "found": shown,
            "wanted": f"at most {COST:.1%}",
            "met": own <= COST * seconds,
        }
