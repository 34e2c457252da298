"""Scripts in a worker forked from a zygote and in plain Python: they cannot tell.

One zygote serves all these scripts, since Python reads the file only after the fork.
"""

import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.light import with_light_torch
from tests.process import probe as probe_module
from tests.process.bench import bench, run_plain
from torchelastic import env
from torchelastic.agent.spawn.processes import command_line
from torchelastic.config import Entry

SCRIPTS = {
    "ends": "print('done')",
    "prints without a newline": "print('unfinished', end='')",
    "reads its input": "print(input().upper(), input())",
    "exits with a code": "import sys; sys.exit(3)",
    "exits with a text": "import sys; sys.exit('no such thing')",
    "exits with nothing": "import sys; sys.exit()",
    "exits with True": "import sys; sys.exit(True)",
    "has a collector": "import gc; print(gc.isenabled(), gc.get_threshold())",
    "exits at once": "import os; print('here'); os._exit(5)",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "is interrupted": "raise KeyboardInterrupt",
    "interrupts itself": "import os, signal; os.kill(os.getpid(), 2); print('not here')",
    "does not parse": "def f(:\n    pass",
    "has no such import": "import no_such_module",
    "fails": """
        def inner(x):
            return 1 / x

        def outer(x):
            try:
                inner(x)
            except ZeroDivisionError as error:
                raise RuntimeError('what a pity') from error

        outer(0)
        """,
    "fails with a group": """
        import sys
        if sys.version_info >= (3, 11):
            raise ExceptionGroup('two', [ValueError(1), TypeError(2)])
        """,
    "fails with its own hook": """
        import sys
        def hook(kind, error, where):
            print('hook:', kind.__name__, error, where.tb_lineno)
        sys.excepthook = hook
        raise RuntimeError('seen')
        """,
    "fails in a broken hook": """
        import sys
        def hook(*args):
            raise TypeError('worse')
        sys.excepthook = hook
        raise RuntimeError('bad')
        """,
    "fails in a thread": """
        import threading
        def work():
            raise ValueError('in a thread')
        thread = threading.Thread(target=work, name='worker')
        thread.start()
        thread.join()
        print('goes on')
        """,
    "fails when it is collected": """
        class Fails:
            def __del__(self):
                raise ValueError('too late')
        kept = Fails()
        del kept
        """,
    "exits while a thread works": """
        import threading
        def work():
            threading.main_thread().join()
            print('thread is done')
        threading.Thread(target=work).start()
        print('main is done')
        """,
    "cleans up at its end": """
        import atexit, sys, weakref
        class Thing:
            pass
        thing = Thing()
        weakref.finalize(thing, print, 'finalized')
        atexit.register(print, 'first')
        atexit.register(print, 'second')
        import os
        atexit.register(lambda: sys.exit(4))
        """,
    "knows its source": """
        import inspect, sys, traceback, linecache
        def f():
            'doc'
            return 1
        class C: pass
        print(inspect.getsource(f))
        print(inspect.getsourcefile(C), inspect.getfile(sys.modules['__main__']))
        print([frame.filename for frame in inspect.stack()], __file__, f.__module__)
        traceback.print_stack()
        """,
    "warns": """
        import warnings
        warnings.warn('careful', stacklevel=1)
        warnings.warn('deeper', stacklevel=9)
        warnings.warn('old', DeprecationWarning)
        """,
    "logs": """
        import logging
        logging.basicConfig(level='INFO')
        logging.info('said')
        logging.getLogger('x').error('with stack', stack_info=True)
        """,
    "pickles its classes": """
        import pickle, __main__
        class Point:
            def __init__(self, x): self.x = x
        data = pickle.dumps(Point(3))
        print(data.count(b'__main__'), pickle.loads(data).x, __main__.Point is Point)
        """,
    "starts programs": """
        import os, subprocess, sys
        code = 'import os, sys; print(sys.path, len(os.environ), sys.flags, sys.orig_argv)'
        os.environ.pop('TORCHELASTIC_CHANNEL_FD', None)
        print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True))
        print(os.system('exit 3'), os.popen('ls /proc/self/fd | wc -l').read())
        """,
    "forks": """
        import os
        pid = os.fork()
        if pid == 0:
            raise SystemExit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """,
    "fails in a fork": """
        import os
        pid = os.fork()
        if pid == 0:
            raise RuntimeError('in the child')
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """,
    "uses asyncio": """
        import asyncio
        async def main():
            process = await asyncio.create_subprocess_exec('true')
            return await process.wait()
        print(asyncio.run(main()))
        """,
    "uses multiprocessing": """
        import multiprocessing, os, sys
        class Point:
            def __init__(self, x): self.x = x
        def double(point):
            return Point(point.x * 2)
        def fail(x):
            raise ValueError(x)
        if __name__ == '__main__':
            for method in ('spawn', 'forkserver', 'fork'):
                context = multiprocessing.get_context(method)
                with context.Pool(2) as pool:
                    print(method, [point.x for point in pool.map(double, map(Point, range(3)))])
                process = context.Process(target=fail, args=(method,))
                process.start()
                process.join()
                print(process.exitcode)
        """,
}


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    """A bench with a warm zygote for `train.py`, and what runs `train.py` plainly."""
    directory = tmp_path_factory.mktemp("script")
    script = directory / "train.py"
    script.write_text("")
    environ = with_light_torch()
    with bench(directory) as made:
        ready = made.start_zygote(Entry("script", str(script)), environ)
        assert isinstance(ready, float), ready
        yield made, script, environ


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_as_it_would(zygote, name):
    made, script, environ = zygote
    script.write_text(dedent(SCRIPTS[name]))
    entry = Entry("script", str(script), ("--name", name))
    plain = run_plain(command_line(entry, sys.executable), environ, made.directory, "one\ntwo\n")
    forked = made.run(entry, environ, stdin="one\ntwo\n")
    assert (forked.exitcode, forked.stdout) == (plain.exitcode, plain.stdout)
    assert without_pids(forked.stderr) == without_pids(plain.stderr)


def without_pids(text):
    """Addresses of objects differ between any two processes."""
    return [line.split(" at 0x")[0] for line in text.splitlines()]


def test_a_script_that_is_gone_is_missed_as_python_does(zygote):
    made, script, environ = zygote
    script.unlink()
    entry = Entry("script", str(script))
    plain = run_plain(command_line(entry, sys.executable), environ, made.directory)
    forked = made.run(entry, environ)
    assert plain.exitcode == 2
    assert (forked.exitcode, forked.stderr) == (plain.exitcode, plain.stderr)


def test_arguments_may_differ_from_worker_to_worker(zygote):
    made, script, environ = zygote
    script.write_text("import sys; print(sys.argv, open('/proc/self/cmdline').read().split('\\0'))")
    for args in ((), ("1",), ("--a-longer-one", "x" * 200)):
        ran = made.run(Entry("script", str(script), args), environ)
        argv, shown = ran.stdout.strip().split("] [")
        assert argv == str([str(script), *args])[:-1]
        assert str(script) in shown


TORCH_SCRIPT = """
import json, os, random, sys
import numpy, torch, torch.distributed, torch.multiprocessing
from torch.utils.data import DataLoader, TensorDataset

def double(x):
    return x * 2

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, x):
        return torch.relu(self.layer(x)).sum()

def main():
    torch.manual_seed(0)
    found = {}
    found["threads"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
    data = TensorDataset(torch.arange(8.0).reshape(8, 1))
    loader = DataLoader(data, batch_size=2, num_workers=2, shuffle=True)
    found["loader"] = [batch[0].tolist() for batch in loader]
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).backward()
        optimizer.step()
    found["trained"] = [p.tolist() for p in model.parameters()]
    compiled = torch.compile(double, backend="eager")
    found["compiled"] = compiled(torch.arange(3)).tolist()
    found["matmul"] = (torch.randn(200, 200) @ torch.randn(200, 200)).sum().item()
    found["numpy"] = float(numpy.ones((100, 100)) @ numpy.ones(100) @ numpy.ones(100))
    found["cuda"] = torch.cuda.is_available()
    found["nvml"] = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    found["children"] = open(f"/proc/self/task/{os.getpid()}/children").read()
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""

SEEDS = """
import json, multiprocessing, random
import numpy, torch
print(json.dumps([
    torch.initial_seed(), torch.rand(1).item(), numpy.random.rand(), random.random(),
    multiprocessing.current_process().authkey.hex(),
]))
"""

INDUCTOR = """
import torch
def f(x):
    return torch.sin(x) + torch.cos(x)
x = torch.arange(8.0)
print(torch.allclose(torch.compile(f)(x), f(x)))
"""


@pytest.fixture(scope="module")
def torch_zygote(tmp_path_factory):
    directory = tmp_path_factory.mktemp("torch")
    script = directory / "train.py"
    script.write_text("")
    with bench(directory) as made:
        ready = made.start_zygote(Entry("script", str(script)), env.snapshot())
        assert isinstance(ready, float), ready
        yield made, script, env.snapshot()


@pytest.mark.slow
def test_torch_works_as_it_would(torch_zygote):
    """Torch is imported twice, and compiles."""
    made, script, environ = torch_zygote
    script.write_text(TORCH_SCRIPT)
    entry = Entry("script", str(script))
    plain = run_plain(command_line(entry, sys.executable), environ, made.directory)
    forked = made.run(entry, environ)
    assert plain.exitcode == 0, plain.stderr
    assert (forked.exitcode, forked.stderr) == (plain.exitcode, plain.stderr)
    assert json.loads(forked.stdout) == json.loads(plain.stdout)


def test_every_worker_has_random_numbers_of_its_own(torch_zygote):
    """Its zygote imports torch."""
    made, script, environ = torch_zygote
    script.write_text(SEEDS)
    first, second = (
        json.loads(made.run(Entry("script", str(script)), environ).stdout) for _ in range(2)
    )
    assert all(ours != theirs for ours, theirs in zip(first, second, strict=True))


@pytest.mark.slow
def test_inductor_compiles_in_a_forked_worker(torch_zygote):
    """A compiler runs."""
    made, script, environ = torch_zygote
    script.write_text(INDUCTOR)
    ran = made.run(Entry("script", str(script)), environ)
    assert (ran.exitcode, ran.stdout) == (0, "True\n"), ran.stderr


# --- what a program finds out about how it was started -------------------------------------------

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
