"""Behind scripts/screenshots: the page of real jobs, as docs/images/dashboard-*.png.

One job is trained by two nodes on this machine; a worker is killed, then a node, and another node
joins. Of a second one all attempts fail. Nodes have names of their own where this is run by root.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.browser.conftest import PATIENCE, address
from tests.process.jobs import Job, Node, dashboard
from tests.support import poll_for

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SCRIPTS = ("trainer.py", "failing.py")
#: Seconds of undisturbed training between two events: it is a picture that should have some.
QUIET = 14.0
WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 360, "height": 780}


#: Each pixel's place in a palette of its picture.
INDEXED = """async (given) => {
  const blob = new Blob([Uint8Array.from(atob(given), (one) => one.charCodeAt(0))]);
  const bitmap = await createImageBitmap(blob);
  const { width, height } = bitmap;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const colours = new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
  const counts = new Map();
  for (const one of colours) counts.set(one, (counts.get(one) ?? 0) + 1);
  const parts = (one) => [one & 255, (one >> 8) & 255, (one >> 16) & 255];
  // The few pixels of a swatch count more than the many greys around letters.
  const worth = (one) => {
    const colourful = Math.max(...parts(one)) - Math.min(...parts(one)) > 50;
    return counts.get(one) * (colourful ? 30 : 1);
  };
  const ranked = [...counts.keys()].sort((one, other) => worth(other) - worth(one));
  const palette = ranked.slice(0, 256).map(parts);
  const apart = ([a, b, c], [x, y, z]) => (a - x) ** 2 + (b - y) ** 2 + (c - z) ** 2;
  const nearest = (one) => {
    const away = palette.map((other) => apart(parts(one), other));
    return away.indexOf(Math.min(...away));
  };
  const places = new Map(ranked.map((one, place) => [one, place < 256 ? place : nearest(one)]));
  let pixels = "";
  for (const one of colours) pixels += String.fromCharCode(places.get(one));
  return { width, palette: palette.flat(), pixels: btoa(pixels) };
}"""


class NamedJob(Job):
    """Its nodes are called node-a, node-b, …"""

    def start_named(self, flags: str = "", script: Sequence[str] = ("trainer.py",)) -> Node:
        python, name = sys.executable, f"node-{'abcdef'[len(self.nodes)]}"
        if os.geteuid() == 0:
            shell = f'hostname {name}; exec {python} "$@"'
            sys.executable = _written(self.directory / name, f"unshare --uts sh -c '{shell}' sh")
        try:
            return self.start(flags, script=list(script))
        finally:
            sys.executable = python


def _written(path: Path, command: str) -> str:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o700)
    return str(path)


def train_on() -> None:
    time.sleep(QUIET)


def worlds(job: Job, size: int, since: int) -> int:
    """Wait for a world of so many workers after a generation; its own."""

    def formed() -> list[int]:
        records = job.nodes[0].events("world-formed")
        found = [(one["generation"], one["size"]) for one in records]
        return [
            generation for generation, workers in found if generation > since and workers == size
        ]

    return poll_for(formed, what=f"a world of {size}", timeout=120)[-1]


def shoot(browser: Any, url: str, name: str, **options: Any) -> None:
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    page.wait_for_selector("#log")
    page.wait_for_timeout(1000)
    png = page.screenshot(full_page=True)
    page.goto("about:blank")
    path = IMAGES / f"dashboard-{name}.png"
    path.write_bytes(packed(page, png))
    context.close()
    print(f"{path.name}: {path.stat().st_size // 1000} kB")


def packed(page: Any, png: bytes) -> bytes:
    """The picture with the 256 colours it has most of: a third of the bytes."""
    found = page.evaluate(INDEXED, base64.b64encode(png).decode())
    width, pixels = found["width"], bytes(base64.b64decode(found["pixels"]))
    rows = b"".join(b"\0" + pixels[at : at + width] for at in range(0, len(pixels), width))
    head = struct.pack(">IIBBBBB", width, len(pixels) // width, 8, 3, 0, 0, 0)
    chunks = (b"IHDR" + head, b"PLTE" + bytes(found["palette"]), b"IDAT" + zlib.compress(rows, 9))
    return png[:8] + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in (*chunks, b"IEND")
    )


def a_job_with_kills(browser: Any, directory: Path) -> None:
    job = NamedJob(directory, "--nnodes=1:3 --nproc-per-node=2 --settle=60 --redirects=3")
    try:
        first = job.start_named("--dashboard=0")
        second = job.start_named()
        generation = worlds(job, 4, -1)
        train_on()
        (pid,) = first.events("workers-started")[-1]["pids"][-1:]
        os.kill(pid, signal.SIGKILL)
        generation = worlds(job, 4, generation)
        train_on()
        second.kill()
        generation = worlds(job, 2, generation)
        train_on()
        job.start_named()
        worlds(job, 4, generation)
        train_on()
        url = address(first.stderr)
        shoot(browser, url, "light", viewport=WIDE, color_scheme="light")
        shoot(browser, url, "dark", viewport=WIDE, color_scheme="dark")
        shoot(browser, url, "narrow", viewport=NARROW, color_scheme="light")
    finally:
        job.close()


def a_job_that_fails(browser: Any, directory: Path) -> None:
    job = NamedJob(directory, "--nnodes=1 --nproc-per-node=2 --max-restarts=1 --redirects=3")
    try:
        job.start_named(script=("failing.py",)).wait(240)
        with dashboard(str(job.nodes[0].directory / "logs")) as url:
            shoot(browser, url, "failed", viewport=WIDE, color_scheme="light")
    finally:
        job.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "install Debian's chromium"
    flags = ["--disable-lcd-text", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with tempfile.TemporaryDirectory(prefix="torchelastic_screenshots_") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        for script in SCRIPTS:
            shutil.copy(Path(__file__).with_name(script), directory)
        os.chdir(directory)  # tracebacks have no path of this machine
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=flags)
            a_job_with_kills(browser, Path(directory) / "kills")
            a_job_that_fails(browser, Path(directory) / "fails")
            browser.close()


if __name__ == "__main__":
    main()
