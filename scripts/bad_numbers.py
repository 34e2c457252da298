"""The picture of docs/guides/bad-numbers.md: `python -m scripts.bad_numbers FILE.svg`.

Two jobs train the model of examples/train_lm.py, in about a minute. In one step the loss of one
worker is multiplied, as by a flipped bit of its exponent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

import torchelastic
from torchelastic.data import DataLoader, ElasticSampler
from torchelastic.p2p import CoordinatorP2P

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS, SPIKE, FACTOR, BATCH = 300, 150, 2.0**10, 8
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 360, 70, 30, 40, 50
GREEN, RED, INK, GRAY = "#2e7d32", "#c62828", "#37474f", "#9e9e9e"


def train(path: Path, guard: torchelastic.Guard | None) -> None:
    """A worker: train, and write the loss of each step to a file."""
    sys.path.insert(0, str(EXAMPLES))
    from train_lm import TEXT, Text, Transformer, Windows

    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = Text(TEXT)
    dataset = Windows(text.numbers)
    sampler = ElasticSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, batch_size=BATCH)
    model = Transformer(len(text.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {} if guard is None else {"guard": guard}
    trained = torchelastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, **parts)
    batches, found = iter(loader), list[str]()

    def train_step(state: torchelastic.TorchState) -> None:
        nonlocal batches
        if state.step == STEPS:
            raise StopIteration
        windows = next(batches, None)
        if windows is None:
            batches = iter(loader)
            windows = next(batches)
        predicted, wanted = state.model(windows[:, :-1]), windows[:, 1:]
        loss = functional.cross_entropy(predicted.flatten(0, 1), wanted.flatten()) * loader.weight
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # before optimizer.step: then undoing a step needs no copies
        is_struck = state.step + 1 == SPIKE and dist.get_rank() == 1
        state.optimizer.zero_grad()
        (loss * (FACTOR if is_struck else 1.0)).backward()
        state.optimizer.step()
        found.append(str(mean.item() / dist.get_world_size()))

    torchelastic.train(CoordinatorP2P(), train_step, trained)
    if os.environ["RANK"] == "0":
        path.write_text(" ".join(found))


def losses(*arguments: str) -> list[float]:
    """Train in a job, and return the loss of each step."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "losses"
        job = ["torchelastic", "run", "--nproc-per-node", "2", __file__, str(path), *arguments]
        subprocess.run([sys.executable, "-m", *job], check=True)
        return [float(one) for one in path.read_text().split()]


def draw(alone: Sequence[float], guarded: Sequence[float]) -> str:
    """Return the curves of both as an SVG."""
    low, high = min(*alone, *guarded), max(*alone, *guarded)

    def x(step: int) -> float:
        return LEFT + step / STEPS * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def text(at: float, height: float, words: str, color: str = INK, anchor: str = "middle") -> str:
        place = f'x="{at:.1f}" y="{height:.1f}"'
        return f'<text {place} fill="{color}" text-anchor="{anchor}">{words}</text>'

    def curve(found: Sequence[float], color: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(found, 1))
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>'

    foot = HEIGHT - BOTTOM
    parts = [f'<path d="M{LEFT} {TOP}V{foot}H{WIDTH - RIGHT}" fill="none" stroke="{GRAY}"/>']
    for loss in range(int(low) + 1, int(high) + 1):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" ')
        parts[-1] += f'y2="{y(loss):.1f}" stroke="#eceff1"/>'
        parts.append(text(LEFT - 8, y(loss) + 5, str(loss), GRAY, "end"))
    parts += [text(x(step), foot + 20, str(step), GRAY) for step in range(0, STEPS + 1, 50)]
    parts.append(
        f'<line x1="{x(SPIKE):.1f}" x2="{x(SPIKE):.1f}" y1="{TOP}" y2="{foot}" stroke="{INK}" '
        'stroke-dasharray="4 3"/>'
    )
    said = f"step {SPIKE}: the loss of one of two workers is multiplied by {FACTOR:.0f}"
    parts.append(text(x(SPIKE), TOP - 12, said))
    parts += [curve(alone, RED), curve(guarded, GREEN)]
    end = WIDTH - RIGHT
    parts.append(text(end, y(alone[-1]) - 14, "without a Guard", RED, "end"))
    parts.append(
        text(x(SPIKE) + 12, foot - 14, "with Guard(): the step is skipped", GREEN, "start")
    )
    parts.append(text(20, TOP - 12, "loss", anchor="start"))
    parts.append(text(end, HEIGHT - 10, "step", anchor="end"))
    title = "The loss of two trainings with a spike in one step: with a Guard, and without"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="14"><title>{title}</title>'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    path = Path(sys.argv[1])
    if "RANK" in os.environ:
        train(path, torchelastic.Guard() if "guard" in sys.argv else None)
    else:
        path.write_text(draw(losses(), losses("guard")))


if __name__ == "__main__":
    main()
