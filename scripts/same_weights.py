"""The picture of docs/guides/fixed-batch.md: drawn by `scripts/demo --bits --picture FILE.svg`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH, LEFT, RIGHT, ROW = 900, 140, 30, 18
GREEN, RED, INK, GRAY = "#2e7d32", "#c62828", "#37474f", "#9e9e9e"
#: A color for each number of workers.
COLORS = {1: "#6a1b9a", 2: "#1565c0", 3: "#00838f", 4: "#2e7d32"}


def draw(
    disturbed: Sequence[dict[str, Any]],
    alone: Sequence[dict[str, Any]],
    faults: Sequence[tuple[float, str]],
) -> str:
    """Return an SVG: the steps of each worker process over time, and the hashes at the end.

    A step has `t`, `pid`, `step`, `size` and `digest`; a fault has its time and a text.
    """
    begin, end = faults[0][0] - 2.0, max(one["t"] for one in disturbed)
    shown = [one for one in disturbed if begin <= one["t"] <= end]
    workers = list(dict.fromkeys(one["pid"] for one in shown))
    top = 58

    def x(at: float) -> float:
        return LEFT + (at - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    def text(at: float, y: float, words: str, color: str = INK, anchor: str = "middle") -> str:
        return f'<text x="{at:.1f}" y="{y}" fill="{color}" text-anchor="{anchor}">{words}</text>'

    def row(steps: Sequence[dict[str, Any]], y: float) -> list[str]:
        """A path of marks for each number of workers."""
        marks: dict[int, str] = {}
        for one in steps:
            if begin <= one["t"] <= end:
                marks[one["size"]] = f"{marks.get(one['size'], '')}M{x(one['t']):.1f} {y}v{ROW - 5}"
        return [
            f'<path d="{path}" stroke="{COLORS.get(size, INK)}" stroke-width="1.2"/>'
            for size, path in marks.items()
        ]

    parts = []
    for number, pid in enumerate(workers):
        parts += row([one for one in shown if one["pid"] == pid], top + number * ROW)
    middle = top + len(workers) * ROW / 2
    parts.append(text(LEFT - 12, middle - 3, "one job", anchor="end"))
    parts.append(text(LEFT - 12, middle + 15, f"{len(workers)} processes", GRAY, "end"))
    bottom = top + len(workers) * ROW + 6
    for number, (at, words) in enumerate(faults):
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{top - 12}" y2="{bottom}" '
            f'stroke="{RED}" stroke-width="1.5" stroke-dasharray="4 3"/>'
        )
        parts.append(text(x(at), top - 18 - 18 * (number % 2), words, RED))
    y = bottom + 22
    parts += row(alone, y)
    parts.append(text(LEFT - 12, y + 12, "one worker", anchor="end"))
    y += ROW + 30
    last = max({one["step"] for one in shown} & {one["step"] for one in alone})
    for name, steps in (("one job", disturbed), ("one worker", alone)):
        for digest in sorted({one["digest"] for one in steps if one["step"] == last}):
            parts.append(text(LEFT - 12, y, name, anchor="end"))
            words = f"step {last}: SHA-256 {digest}"
            parts.append(text(LEFT, y, words, GREEN, "start").replace("<text ", "<text class='m' "))
            y += 20
    title = "The steps of a job with faults and of one worker, and the hash of their weights"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'font-family="sans-serif" font-size="14"><title>{title}</title>'
        "<style>.m{font-family:monospace;font-size:12px}</style>"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
