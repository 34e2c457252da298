"""Kill a rank of examples/train_llama_hsdp.py, and draw its replicas over time as an SVG.

    .venv/bin/python scripts/replicas.py docs/images/replicas.svg

Prints what the job prints. The picture of docs/guides/sharded-train.md is made of these lines: a
mark for each step of each replica, at the time at which the replica printed it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from datetime import datetime, time
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_llama_hsdp.py"
#: The step at which a worker is killed, and the last one.
KILL, STEPS = 20, 60
WIDTH, LEFT, ROW = 900, 110, 64
GREEN, GRAY, RED, INK = "#2e7d32", "#9e9e9e", "#c62828", "#37474f"
STEP = re.compile(r"([\d:.]+)  step +(\d+) .* replica (\d+) of")


class Run:
    """The observations of one run."""

    def __init__(self) -> None:
        #: By replica, the time and the number of each of its steps.
        self.steps: dict[int, list[tuple[float, int]]] = {0: [], 1: []}
        self.killed_at = 0.0
        #: A worker of replica 1.
        self.victim = 0

    def read(self, line: str) -> None:
        if found := re.match(r"process (\d+): .*replica 1", line):
            self.victim = int(found[1])
        elif found := STEP.match(line):
            step, replica = int(found[2]), int(found[3])
            self.steps[replica].append((seconds(time.fromisoformat(found[1])), step))
            if step == KILL and not self.killed_at:
                os.kill(self.victim, signal.SIGKILL)
                now = datetime.now().time()
                self.killed_at = seconds(now)
                print(f"{now.isoformat('milliseconds')}  kill -9 {self.victim}", flush=True)


def seconds(clock: time) -> float:
    """Return the seconds since midnight."""
    return clock.hour * 3600 + clock.minute * 60 + clock.second + clock.microsecond / 1e6


def run() -> Run:
    command = [sys.executable, "-m", "torchelastic", "run", "--nproc-per-node=4"]
    command += [str(EXAMPLE), f"--steps={STEPS}"]
    seen = Run()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line.decode(), end="", flush=True)
            seen.read(line.decode())
    if job.returncode:
        sys.exit(job.returncode)
    return seen


def draw(seen: Run) -> str:
    """Return an SVG of the time around the kill."""
    lost = [at for at, _ in seen.steps[1]]
    gap = max(range(KILL, len(lost)), key=lambda one: lost[one] - lost[one - 1])
    back = lost[gap]
    away = back - seen.killed_at
    begin, end = seen.killed_at - 0.8 * away, back + 1.2 * away

    def x(at: float) -> float:
        return LEFT + (at - begin) / (end - begin) * (WIDTH - LEFT - 40)

    def text(at: float, y: float, words: str, color: str = INK, anchor: str = "middle") -> str:
        return f'<text x="{at:.1f}" y="{y}" fill="{color}" text-anchor="{anchor}">{words}</text>'

    parts = []
    for replica in (0, 1):
        y = 52 + replica * ROW
        parts.append(text(LEFT - 12, y + 18, f"replica {replica}", anchor="end"))
        pieces = [(begin, end)] if replica == 0 else [(begin, seen.killed_at), (back, end)]
        for left, right in pieces:
            parts.append(
                f'<rect x="{x(left):.1f}" y="{y}" width="{x(right) - x(left):.1f}" height="26" '
                f'rx="3" fill="{GREEN}" opacity="0.18"/>'
            )
        for at, number in seen.steps[replica]:
            if begin <= at <= end:
                parts.append(
                    f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{y}" y2="{y + 26}" '
                    f'stroke="{GREEN}" stroke-width="2"><title>step {number}</title></line>'
                )
    y = 52 + ROW
    parts.append(
        f'<rect x="{x(seen.killed_at):.1f}" y="{y}" width="{x(back) - x(seen.killed_at):.1f}" '
        f'height="26" rx="3" fill="{GRAY}" opacity="0.25"/>'
    )
    middle = (x(seen.killed_at) + x(back)) / 2
    parts.append(text(middle, y + 18, "one worker waits, another starts"))
    parts.append(
        f'<line x1="{x(seen.killed_at):.1f}" x2="{x(seen.killed_at):.1f}" y1="34" y2="{y + 32}" '
        f'stroke="{RED}" stroke-width="2" stroke-dasharray="4 3"/>'
    )
    parts.append(text(x(seen.killed_at), 26, "kill -9 of a worker of replica 1", RED))
    parts.append(text(x(back), y + 46, "whole again", GREEN))
    unit = 0.5 if away < 2 else 1.0
    for number in range(-20, 60):
        at = seen.killed_at + number * unit
        if begin <= at <= end:
            shown = f"{number * unit:+g} s" if number else "0"
            parts.append(text(x(at), y + 72, shown, GRAY))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 84}" '
        f'font-family="sans-serif" font-size="14"><title>The steps of two replicas, one of which '
        f'loses a worker</title><rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(run()))
