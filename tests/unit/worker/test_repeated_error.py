"""One line replaces a traceback that repeats in every generation, or only tells of a lost peer."""

import subprocess
import sys

import pytest

from torchelastic.events import failure
from torchelastic.worker import error_file, repeated_error

PLAIN = 'Traceback (most recent call last):\n  File "a.py", line {line}, in f\n    f()\n{error}\n'


def fell(directory, generation, error="ValueError: boom", *, line=3, local_rank=1):
    """Write what a worker failed with; its error file."""
    path = directory / f"attempt_{generation}" / str(local_rank) / "error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if error:
        error_file.write(str(path), error, PLAIN.format(line=line, error=error))
    return str(path)


SAME_AS_3 = "the same traceback as in generation 3, {} times now"


@pytest.mark.parametrize(
    ("earlier", "said"),
    [
        pytest.param({}, "", id="new"),
        pytest.param({3: {}}, SAME_AS_3.format(2), id="again"),
        pytest.param({3: {}, 4: {}, 5: {}}, SAME_AS_3.format(4), id="every time"),
        pytest.param(
            {3: {}, 4: {"error": ""}, 5: {}}, SAME_AS_3.format(3), id="stopped in between"
        ),
        pytest.param(
            {2: {"error": "KeyError: 1"}, 3: {}}, SAME_AS_3.format(2), id="another one before"
        ),
        pytest.param({2: {}, 3: {"error": "KeyError: 1"}}, "", id="another one in between"),
        pytest.param({3: {"line": 4}}, "", id="another line of code"),
        pytest.param({3: {"local_rank": 0}}, "", id="another worker"),
        pytest.param({7: {}}, "", id="of a later generation"),
    ],
)
def test_messages(tmp_path, earlier, said):
    for generation, what in earlier.items():
        fell(tmp_path, generation, **what)
    assert repeated_error.sentence(fell(tmp_path, 6)) == said


def test_numbers_in_messages_do_not_count(tmp_path):
    fell(tmp_path, 3, "OSError: closed by 10.0.0.7:4711 at 0x7fe8")
    again = fell(tmp_path, 6, "OSError: closed by 10.0.0.7:815 at 0x7fe9")
    assert repeated_error.sentence(again) == SAME_AS_3.format(2)


@pytest.mark.parametrize("path", ["", "/no/such/file", "/tmp/error.json"])
def test_a_file_of_another_layout_says_nothing(path):
    assert repeated_error.sentence(path) == ""


SCRIPT = """
import sys
from torchelastic.worker import bootstrap
bootstrap.attach()
{before}
def f():
    raise {error}
f()
"""
HOOK = "sys.excepthook = lambda *_: print('mine', file=sys.stderr)"
TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
GONE = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"


def runs(tmp_path, generation, before="", *, error="ValueError('boom')"):
    """The output of a worker that raises this error."""
    (tmp_path / "script.py").write_text(SCRIPT.format(before=before, error=error))
    env = {"TORCHELASTIC_ERROR_FILE": fell(tmp_path, generation, ""), "RANK": "0"}
    command = [sys.executable, "-S", "script.py"]
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=env | path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    return done.stderr


def test_one_line_stands_for_it_unless_the_program_has_a_hook_of_its_own(tmp_path):
    assert runs(tmp_path, 0).startswith("Traceback (most recent call last):")
    assert runs(tmp_path, 1) == (
        "ValueError: boom (the same traceback as in generation 0, 2 times now)\n"
    )
    assert runs(tmp_path, 2, HOOK) == "mine\n"


def test_so_it_does_with_a_process_group(tmp_path):
    """torch's hook, which adds the rank to every line, is not the program's own."""
    assert runs(tmp_path, 0, TORCH).startswith("[rank0]: Traceback (most recent call last):")
    assert runs(tmp_path, 1, TORCH) == (
        "[rank0]: ValueError: boom (the same traceback as in generation 0, 2 times now)\n"
    )
    assert runs(tmp_path, 2, HOOK + TORCH) == "[rank0]: mine\n"


def test_a_lost_peer_takes_one_line_and_its_traceback_is_in_the_error_file(tmp_path):
    error = f"RuntimeError('{GONE}. This is typically caused by a remote worker crashing.')"
    path = fell(tmp_path, 0, "")
    assert runs(tmp_path, 0, error=error) == (
        f"RuntimeError: {GONE} (another rank is gone; the traceback is in {path})\n"
    )
    assert "in f\n    raise RuntimeError(" in error_file.read(path).traceback


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"RuntimeError: {GONE}", True),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:1] Read error [::1]:7: Connection reset", True),
        ("DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.", True),
        ("DistBackendError: NCCL error, ncclRemoteError: a call failed", True),
        ("DistNetworkError: The server socket has failed to listen: EADDRINUSE", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9ms", False),
        ("ValueError: boom", False),
    ],
)
def test_lost_peer_traceback_is_recognized(message, expected):
    assert failure.says_peer_gone(message) == expected
