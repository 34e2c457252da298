"""A program cannot tell how it was started: what it finds out is what it would find out plain.

`probe.py` runs as anybody would run it, as a plain worker, and forked from a zygote, when it is
asked for or ahead.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.process import probe as probe_module
from tests.process.bench import bench, run_plain
from torchelastic.agent.processes import command_line
from torchelastic.config import Entry

ARGS = ("--lr", "1e-3", "", "a b", "ü")
FACTS = (
    "main module",
    "interpreter",
    "environment",
    "signals",
    "descriptors",
    "stdin",
    "stdout",
    "stderr",
    "process",
)


def look(ran):
    assert ran.exitcode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module", params=["script", "module"])
def looks(request, tmp_path_factory):
    """The probe's facts: plain, as a plain worker, and from the zygote."""
    directory = tmp_path_factory.mktemp("probe")
    (directory / "probe.py").write_text(Path(probe_module.__file__).read_text())
    entry = Entry(request.param, "probe.py" if request.param == "script" else "probe", ARGS)
    environ = {**with_light_torch(), "RANK": "3"}
    before = os.getcwd()
    os.chdir(directory)
    try:
        with bench(directory) as plain_bench:
            as_worker = plain_bench.run(entry, environ, stdin="hello\n")
        with bench(directory) as zygote_bench:
            rankless = {name: environ[name] for name in environ if name != "RANK"}
            ready = zygote_bench.start_zygote(entry, rankless)
            assert isinstance(ready, float), ready
            forked = zygote_bench.run(entry, environ, stdin="hello\n")
        with bench(directory) as blank_bench:
            blank_bench.start_zygote(entry, rankless, blanks=1)
            blank_bench.until(lambda: blank_bench.zygote.blanks(), "a blank")
            blank = blank_bench.run(entry, environ, stdin="hello\n")
        plain = run_plain(command_line(entry, sys.executable), environ, directory, stdin="hello\n")
    finally:
        os.chdir(before)
    return {
        "plain": look(plain),
        "worker": look(as_worker),
        "forked": look(forked),
        "blank": look(blank),
    }


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("made", ["forked", "blank"])
def test_a_forked_worker_looks_plain(looks, fact, made):
    assert looks[made][fact] == looks["plain"][fact]


@pytest.mark.parametrize("fact", FACTS)
def test_a_worker_without_zygote_looks_plain(looks, fact):
    assert looks["worker"][fact] == looks["plain"][fact]
