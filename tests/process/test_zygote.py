"""The zygote as a process: what it imports, when it steps aside, how it ends."""

import asyncio
import os
import pickle
import shutil
import signal
import sys
from textwrap import dedent

import pytest

from tests.light import PLACE, with_light_torch
from tests.process.bench import bench, pids_of
from tests.support import poll_for
from torchelastic.agent.spawn import zygote_client
from torchelastic.agent.spawn.zygote_client import Zygote
from torchelastic.agent.workers.supervisor import WorkerSpawn
from torchelastic.config import Entry
from torchelastic.errors import SpawnError
from torchelastic.worker.bootstrap import result_path, write_call


@pytest.fixture
def own(tmp_path):
    """A directory that is searched for modules before all others."""
    directory = tmp_path / "own"
    directory.mkdir()
    return directory


@pytest.fixture
def environ(own):
    light = with_light_torch()
    return {**light, "PYTHONPATH": f"{own}{os.pathsep}{light['PYTHONPATH']}"}


@pytest.fixture
def made(tmp_path):
    with bench(tmp_path) as made:
        yield made


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('ran')")
    return path


def spawn_of(entry, environ, **more):
    return WorkerSpawn(local_rank=0, entry=entry, env=environ, **more)


def test_start_returns_while_imports_go_on(made, script, environ, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "slow.py").write_text(f"open({str(gate)!r}).read()")
    entry = Entry("script", str(script))
    made.zygote = Zygote.start(
        python=sys.executable,
        env=environ,
        preload=["slow"],
        command=[sys.executable, "-u", entry.target],
    )
    gate.write_text("go")  # would wait for ever if the import had not begun, or had ended
    assert isinstance(made.do(made.zygote.wait_ready()), float)
    assert made.zygote.warnings == []


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("2.13.0", []),
        ("9.1.0", ["torch 9.1.0 is newer than the versions"]),
        ("2.6.0", ["torch is 2.6.0"]),
    ],
)
def test_a_torch_that_was_never_run_is_reported_once(made, script, environ, own, version, told):
    shutil.copytree(PLACE / "torch", own / "torch")
    with (own / "torch" / "__init__.py").open("a") as file:
        file.write(f"\n__version__ = {version!r}\n")
    made.start_zygote(Entry("script", str(script)), environ)
    assert [
        one[: len(words)] for one, words in zip(made.zygote.warnings, told, strict=True)
    ] == told
    assert made.run(Entry("script", str(script)), environ).stdout == "ran\n"


def test_modules_beside_the_script_are_preloaded(made, script, environ, tmp_path):
    (tmp_path / "mine.py").write_text("import sys; path = list(sys.path)")
    script.write_text("import sys; print('mine' in sys.modules); import mine; print(mine.path[0])")
    made.start_zygote(Entry("script", str(script)), environ, preload=["mine"])
    ran = made.run(Entry("script", str(script)), environ)
    assert ran.stdout == f"True\n{tmp_path}\n"


def test_a_module_that_cannot_be_preloaded_is_named_and_left_out(made, script, environ, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    preload = ["broken", "no_such_module", "leaves"]
    ready = made.start_zygote(Entry("script", str(script)), environ, preload=preload)
    assert isinstance(ready, float)
    assert made.zygote.warnings == [
        "broken cannot be imported: ZeroDivisionError: division by zero",
        "no_such_module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
        "leaves cannot be imported: SystemExit: 3",
    ]
    assert made.run(Entry("script", str(script)), environ).stdout == "ran\n"


def test_preloaded_module_keeps_its_changes_of_the_environment(made, script, environ, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os; os.environ['MINE'] = '1'; os.environ.pop('YOURS', None)"
    )
    script.write_text(
        "import os; print(os.environ.get('MINE'), os.environ.get('YOURS'), os.environ['RANK'])"
    )
    environ["YOURS"] = "1"
    made.start_zygote(Entry("script", str(script)), environ, preload=["mine"])
    ran = made.run(Entry("script", str(script)), {**environ, "RANK": "7"})
    assert ran.stdout == "1 None 7\n"


def test_the_users_sitecustomize_is_imported_too(made, script, environ, own):
    (own / "sitecustomize.py").write_text("import builtins; builtins.said = 'customized'")
    script.write_text("import sitecustomize; print(said, sitecustomize.__file__)")
    made.start_zygote(Entry("script", str(script)), environ)
    ran = made.run(Entry("script", str(script)), environ)
    assert ran.stdout == f"customized {own / 'sitecustomize.py'}\n"


def test_an_error_in_the_users_sitecustomize_is_reported_as_python_does(made, script, environ, own):
    (own / "sitecustomize.py").write_text("1 / 0")
    made.start_zygote(Entry("script", str(script)), environ)
    ran = made.run(Entry("script", str(script)), environ)
    assert (ran.exitcode, ran.stdout) == (0, "ran\n")
    assert "Error in sitecustomize" in ran.stderr
    assert "ZeroDivisionError" in ran.stderr


def test_forked_worker_frees_the_objects_of_triton_at_its_end(made, script, environ, own):
    """Else nanobind, which is below it, prints a page about leaks."""
    ring = "import os\nclass Ring:\n    __del__ = lambda self: os.write(1, b'given back')\n"
    (own / "triton.py").write_text(ring + "ring = Ring()\nring.self = ring\n")
    made.start_zygote(Entry("script", str(script)), environ, preload=["triton"])
    assert made.run(Entry("script", str(script)), environ).stdout == "ran\ngiven back"


def test_zygote_is_not_taken_for_a_worker(made, script, environ):
    made.start_zygote(Entry("script", str(script), ("--flag",)), environ)
    assert pids_of(str(script)) == []
    assert made.zygote.pid in pids_of("torchelastic-zygote")


UNSAFE = {
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()": (
        "has started threads"
    ),
    "import torch\ntorch.cuda.is_initialized = lambda: True": "has used the GPU driver",
}


@pytest.mark.parametrize("source", UNSAFE)
def test_modules_that_cannot_be_forked_are_named_and_the_others_preloaded(
    made, script, environ, tmp_path, source
):
    (tmp_path / "framework").mkdir()
    for name, content in {
        "framework/__init__": "",
        "framework/models": "",
        "framework/trainer": "import framework.models\nimport data",
        "data/__init__": "import data.tools\nimport data.engine",
        "data/after": "",
        "data/tools": "",  # is not imported without its package
        "data/engine": f"{source}\nimport data.after",
        "mine": "import os\nos.environ['MINE'] = str(int(os.environ.get('MINE', 0)) + 1)",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(content)
    names = ("framework.models", "framework.trainer", "data", "data.tools", "data.engine", "mine")
    script.write_text(
        f"import os, sys; print(*(n for n in {names} if n in sys.modules), os.environ['MINE'])"
    )
    entry = Entry("script", str(script))
    preload = ["framework.trainer", "mine"]
    assert isinstance(made.start_zygote(entry, environ, preload=preload), float)
    [warning] = made.zygote.warnings
    assert warning.startswith(f"--preload framework.trainer: data.engine {UNSAFE[source]}")
    assert "every worker imports the rest when it starts" in warning
    assert made.run(entry, environ).stdout == "framework.models mine 1\n"
    assert made.zygote.usable


ASIDE = {
    "import os\nos._exit(3)": "exit code 3",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)": "SIGKILL",
}


@pytest.mark.parametrize("source", ASIDE)
def test_zygote_steps_aside_when_a_copy_would_be_broken(made, script, environ, tmp_path, source):
    (tmp_path / "mine.py").write_text(source)
    entry = Entry("script", str(script))
    assert ASIDE[source] in made.start_zygote(entry, environ, preload=["mine"])
    assert not made.zygote.usable
    with pytest.raises(SpawnError, match=ASIDE[source]):
        made.do(made.zygote.fork(spawn_of(entry, environ), None))
    assert made.run(entry, environ).stdout == "ran\n", "a plain process takes its place"


def test_zygote_checks_itself_before_every_fork(made, script, environ, tmp_path):
    (tmp_path / "mine.py").write_text(
        dedent(
            """
            import signal, threading
            def start(*_):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            signal.signal(signal.SIGALRM, start)
            """
        )
    )
    entry = Entry("script", str(script))
    assert isinstance(made.start_zygote(entry, environ, preload=["mine"]), float)
    os.kill(made.zygote.pid, signal.SIGALRM)
    poll_for(
        lambda: len(os.listdir(f"/proc/{made.zygote.pid}/task")) > 1, what="a thread in the zygote"
    )
    with pytest.raises(SpawnError, match="started threads"):
        made.do(made.zygote.fork(spawn_of(entry, environ), None))
    assert not made.zygote.usable


def test_without_torch_it_steps_aside(made, script, environ, own):
    (own / "torch.py").write_text("raise ImportError('no torch here')")
    ready = made.start_zygote(Entry("script", str(script)), environ)
    assert ready == "torch cannot be imported: ImportError: no torch here"


def test_a_killed_zygote_hurts_no_worker_and_is_replaced_by_plain_processes(made, script, environ):
    script.write_text("print(input())")
    entry = Entry("script", str(script))
    made.start_zygote(entry, environ)
    reader, writer = os.pipe()
    out, into = os.pipe()
    made.start(entry, environ, stdin=reader, stdout=into)
    os.kill(made.zygote.pid, signal.SIGKILL)
    os.write(writer, b"alive\n")
    made.until(lambda: made.exits, "the end of the worker")
    assert os.read(out, 100) == b"alive\n"
    assert made.exits[0].exitcode == 0
    assert made.run(entry, environ, stdin="plain\n").stdout == "plain\n"
    assert "SIGKILL" in made.zygote.aside
    for descriptor in (reader, writer, out, into):
        os.close(descriptor)


def test_a_python_that_skips_our_start_never_runs_the_program(made, environ, tmp_path):
    """`-S` stands for an installation in which `sitecustomize` is not imported."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "train.py"
    script.write_text("while True: pass")
    made.zygote = Zygote.start(
        python=str(python), env=environ, preload=[], command=[str(python), "-u", str(script)]
    )
    assert "does not import sitecustomize" in made.do(made.zygote.wait_ready())


def test_a_package_that_is_broken_never_runs_the_program(made, script, environ, own):
    (own / "torchelastic.py").write_text("1 / 0")
    assert "exit code 1" in made.start_zygote(Entry("script", str(script)), environ)


def test_a_python_that_does_not_exist_is_refused(environ):
    command = ["/no/python", "-u", "x"]
    with pytest.raises(SpawnError, match=r"/no/python cannot be started: .*No such file"):
        Zygote.start(python="/no/python", env=environ, preload=[], command=command)


def test_zygote_refuses_another_script_but_runs_a_helper(made, script, environ, tmp_path):
    made.start_zygote(Entry("script", str(script)), environ)
    with pytest.raises(SpawnError, match=r"started to run .*train\.py"):
        made.do(made.zygote.fork(spawn_of(Entry("script", "other.py"), environ), None))
    assert made.zygote.usable
    ran = made.run(Entry("module", "platform", ("--terse",)), environ)
    assert ran.exitcode == 0
    assert ran.stdout.startswith("Linux")


def test_a_worker_that_cannot_be_prepared_says_why(made, script, environ):
    environ["OMP_NUM_THREADS"] = "1"
    made.start_zygote(Entry("script", str(script)), environ)
    ran = made.run(Entry("script", str(script)), environ, cpus=frozenset({100_000}))
    assert (ran.exitcode, ran.stdout) == (1, "")
    assert "Invalid argument" in ran.stderr
    assert ran.messages[0]["message"] == "OSError: [Errno 22] Invalid argument"


def test_a_cancelled_request_does_not_confuse_the_next(made, script, environ):
    script.write_text("import time; time.sleep(60)")
    entry = Entry("script", str(script))
    made.start_zygote(entry, environ)

    async def cancel_and_ask_again():
        first = asyncio.ensure_future(made.zygote.fork(spawn_of(entry, environ), None))
        while not made.zygote.in_flight:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return await made.zygote.fork(spawn_of(entry, environ), None)

    pid = made.do(cancel_and_ask_again())
    poll_for(lambda: len(pids_of(str(script))) == 2, what="both workers")
    assert pid == max(pids_of(str(script)))


def test_a_frozen_zygote_is_given_up(made, script, environ, monkeypatch):
    monkeypatch.setattr(zygote_client, "ANSWER_TIMEOUT", 0.2)
    entry = Entry("script", str(script))
    made.start_zygote(entry, environ)
    os.kill(made.zygote.pid, signal.SIGSTOP)
    assert made.run(entry, environ).stdout == "ran\n", "a plain process takes its place"
    assert "has not answered" in made.zygote.aside


def test_closing_it_tells_who_waits(made, script, environ, tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    made.zygote = Zygote.start(
        python=sys.executable,
        env=environ,
        preload=["slow"],
        command=[sys.executable, "-u", str(script)],
    )

    async def close_while_waiting():
        waiting = asyncio.ensure_future(made.zygote.wait_ready())
        await asyncio.sleep(0)
        await made.zygote.close()
        return await waiting

    assert "SIGKILL" in made.do(close_while_waiting())


def add(a, b):
    return a + b


@pytest.mark.parametrize("warm", [True, False])
def test_a_function_runs_and_leaves_its_result(made, environ, tmp_path, warm):
    call = str(tmp_path / "call")
    write_call(call, add, (3, 4))
    assert os.stat(call).st_mode & 0o077 == 0
    entry = Entry("function", call)
    if warm:
        made.start_zygote(entry, environ)
    ran = made.run(entry, {**environ, "RANK": "5", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert ran.exitcode == 0, ran.stderr
    with open(result_path(call, 2, 5), "rb") as file:
        assert pickle.load(file) == 7
