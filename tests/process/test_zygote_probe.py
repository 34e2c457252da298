"""A program cannot tell how it was started: what it finds out is what it would find out plain.

`probe.py` runs as anybody would run it, as a plain worker, and forked from a zygote, when it is
asked for or ahead.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.process import probe as probe_module
from tests.process.bench import bench, run_plain
from torchelastic.agent.spawn.processes import command_line
from torchelastic.config import Entry

ARGS = ("--lr", "1e-3", "", "a b", "ü")


def look(ran):
    assert ran.exitcode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_program_cannot_tell_how_it_was_started(tmp_path, monkeypatch, kind):
    (tmp_path / "probe.py").write_text(Path(probe_module.__file__).read_text())
    entry = Entry(kind, "probe.py" if kind == "script" else "probe", ARGS)
    monkeypatch.delenv("RANK", raising=False)
    rankless = with_light_torch()
    environ = {**rankless, "RANK": "3"}
    monkeypatch.chdir(tmp_path)
    with bench(tmp_path) as plain_bench:
        as_worker = plain_bench.run(entry, environ, stdin="hello\n")
    with bench(tmp_path) as zygote_bench:
        ready = zygote_bench.start_zygote(entry, rankless)
        assert isinstance(ready, float), ready
        forked = zygote_bench.run(entry, environ, stdin="hello\n")
    with bench(tmp_path) as prefork_bench:
        prefork_bench.start_zygote(entry, rankless, preforks=1)
        prefork_bench.until(lambda: prefork_bench.zygote.preforks(), "a prefork")
        prefork = prefork_bench.run(entry, environ, stdin="hello\n")
    plain = look(run_plain(command_line(entry, sys.executable), environ, tmp_path, "hello\n"))
    for how, ran in (("as a worker", as_worker), ("forked", forked), ("ahead", prefork)):
        assert look(ran) == plain, how
