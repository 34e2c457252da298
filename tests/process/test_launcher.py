"""`elastic_launch` with a real agent and real workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.ports import free_port
from tests.process import entrypoints
from tests.support import poll_for
from torchelastic import LaunchConfig, elastic_launch
from torchelastic.multiprocessing.errors import ChildFailedError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def light_torch(monkeypatch) -> None:
    """The real one is where a test says so."""
    path = with_light_torch({"PYTHONPATH": str(ROOT)})["PYTHONPATH"]
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture
def script(tmp_path: Path):
    """Run a script file of these lines as a program of its own."""
    running: list[subprocess.Popen[str]] = []

    def start(text: str, *args: str) -> subprocess.Popen[str]:
        path = tmp_path / "caller.py"
        path.write_text(textwrap.dedent(text))
        running.append(
            subprocess.Popen(
                [sys.executable, str(path), *args],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def test_functions_return_by_rank_after_a_restart():
    config = LaunchConfig(nproc_per_node=2, zygote=False)

    results = elastic_launch(config, entrypoints.fail_in_generation_0)("a")

    assert results == {0: ("a", "0", "1"), 1: ("a", "1", "1")}
    assert list(results) == [0, 1]
    assert os.listdir(tempfile.gettempdir()) == []


def test_a_failure_is_raised_with_its_cause(tmp_path):
    config = LaunchConfig(nproc_per_node=2, zygote=False, max_restarts=0, log_dir=str(tmp_path))

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, entrypoints.fail_on_rank_1)("boom")

    rank, failed = caught.value.get_first_failure()
    assert (rank, failed.exitcode, failed.message["message"]) == (1, 1, "RuntimeError: boom")
    assert Path(failed.error_file).exists()
    assert caught.value.name == "fail_on_rank_1"
    assert "Root Cause (first observed failure):" in str(caught.value)


@pytest.mark.slow
def test_two_nodes_of_one_job_have_the_results_of_their_own_workers():
    endpoint = f"127.0.0.1:{free_port()}"
    config = LaunchConfig(min_nodes=2, max_nodes=2, rdzv_endpoint=endpoint, zygote=False)
    results = []

    def run() -> None:
        results.append(elastic_launch(config, entrypoints.echo)("a"))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(results, key=list) == [{0: ("a", "0")}, {1: ("a", "1")}]


def test_functions_and_classes_of_a_script_are_found(script):
    caller = script(
        """
        import os
        from torchelastic import LaunchConfig, elastic_launch

        class Plan:
            def __init__(self, words):
                self.words = words

        def train(plan):
            assert isinstance(plan, Plan) and __name__ != "__main__"
            return Plan([*plan.words, os.environ["RANK"]])

        if __name__ == "__main__":
            results = elastic_launch(LaunchConfig(zygote=False), train)(Plan(["a"]))
            print("results", {rank: plan.words for rank, plan in results.items()})
        """
    )

    out, _ = caller.communicate()

    assert caller.returncode == 0, out
    assert "results {0: ['a', '0']}" in out


def test_a_script_that_would_launch_itself_without_end_is_rejected_with_a_reason(script):
    caller = script(
        """
        from torchelastic import LaunchConfig, elastic_launch

        def train():
            return 0

        elastic_launch(LaunchConfig(zygote=False, max_restarts=0), train)()
        """
    )

    out, _ = caller.communicate()

    assert caller.returncode == 1
    assert "if __name__ == '__main__':" in out


def test_without_cloudpickle_a_function_that_is_in_no_file_is_refused_at_once():
    typed = (
        "import sys; sys.modules['cloudpickle'] = None\n"
        "import torchelastic as t\ndef train(): ...\nt.elastic_launch(t.LaunchConfig(), train)()"
    )

    done = subprocess.run([sys.executable, "-c", typed], stderr=subprocess.PIPE, text=True)

    assert "train is defined in a notebook or interactive session" in done.stderr
    assert "pip install cloudpickle" in done.stderr
    assert "%%writefile steps.py" in done.stderr


CELLS = (
    "from torchelastic import LaunchConfig, elastic_launch",
    "import os\nclass Offset:\n    def __init__(self, by): self.by = by",
    "ADD = 100",
    "def train(offset):\n    print('in the worker')\n"
    "    return int(os.environ['RANK']) + offset.by + ADD",
    "print(elastic_launch(LaunchConfig(nproc_per_node=2, zygote=False), train)(Offset(10)))",
)


RUN_NOTEBOOK = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(text) for text in json.loads(sys.argv[1])]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
print("".join(one.get("text", "") for one in notebook.cells[-1].outputs))
"""


@pytest.mark.needs("nbclient")
def test_a_function_of_a_cell_runs_in_a_notebook(tmp_path):
    """In a real kernel, with a class and a variable of other cells; output is under the cell."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_NOTEBOOK, json.dumps(CELLS)],
        env={**os.environ, "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert "{0: 110, 1: 111}" in done.stdout, done.stderr
    assert done.stdout.count("in the worker") == 2
    assert "2 workers on 1 node" in done.stdout


CALLER = """
import sys
from tests.process.entrypoints import sleep_for_ever
from torchelastic import LaunchConfig, elastic_launch

if __name__ == "__main__":
    try:
        elastic_launch(LaunchConfig(zygote=False, shutdown_timeout=20), sleep_for_ever)(sys.argv[1])
    except BaseException as error:
        print("caught", type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("signum", "caught"),
    [(signal.SIGINT, "caught KeyboardInterrupt"), (signal.SIGTERM, "caught JobInterrupted")],
)
def test_a_signal_to_the_caller_ends_the_job_and_is_raised(signum, caught, script, tmp_path):
    ready = tmp_path / "ready"
    caller = script(CALLER, str(ready))
    poll_for(ready.exists, what="a worker", timeout=60)

    caller.send_signal(signum)
    out, _ = caller.communicate()

    assert caller.returncode == 0, out
    assert caught in out


def test_nothing_outlives_a_caller_that_is_killed(script, tmp_path):
    ready = tmp_path / "ready"
    caller = script(CALLER, str(ready))
    poll_for(ready.exists, what="a worker", timeout=60)

    caller.kill()  # the fixture looks for what is left


@pytest.mark.slow
def test_a_handler_of_the_callers_that_raises_ends_the_job(script, tmp_path):
    ready = tmp_path / "ready"
    handler = """
import signal

def give_up(signum, frame):
    raise TimeoutError("enough")

signal.signal(signal.SIGTERM, give_up)
"""
    caller = script(handler + CALLER, str(ready))
    poll_for(ready.exists, what="a worker", timeout=60)

    caller.terminate()
    out, _ = caller.communicate()

    assert "caught TimeoutError enough" in out


def test_torchs_own_record_tells_as_ours_does(tmp_path):
    train = tmp_path / "train.py"
    train.write_text(
        textwrap.dedent(
            """
            from torch.distributed.elastic.multiprocessing.errors import record

            @record
            def main():
                raise RuntimeError("told by torch")

            if __name__ == "__main__":
                main()
            """
        )
    )
    config = LaunchConfig(max_restarts=0, log_dir=str(tmp_path / "logs"))

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, "env")("-u", "PYTHONPATH", sys.executable, "-u", str(train))

    _, failed = caught.value.get_first_failure()
    assert failed.message["message"] == "RuntimeError: told by torch"
    assert "in main" in failed.message["extraInfo"]["py_callstack"]
