"""A traceback that repeats in every generation is printed once, then counted."""

import subprocess
import sys

import pytest

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
        ({}, ""),
        ({3: {}}, SAME_AS_3.format(2)),
        ({3: {}, 4: {}, 5: {}}, SAME_AS_3.format(4)),
        ({3: {}, 4: {"error": ""}, 5: {}}, SAME_AS_3.format(3)),
        ({2: {"error": "KeyError: 1"}, 3: {}}, SAME_AS_3.format(2)),
        ({2: {}, 3: {"error": "KeyError: 1"}}, ""),
        ({3: {"line": 4}}, ""),
        ({3: {"local_rank": 0}}, ""),
        ({7: {}}, ""),
    ],
    ids=[
        "new",
        "again",
        "every time",
        "stopped in between",
        "another one before",
        "another one in between",
        "another line of code",
        "another worker",
        "of a later generation",
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
    raise ValueError("boom")
f()
"""


def test_one_line_stands_for_it_unless_the_program_has_a_hook_of_its_own(tmp_path):
    def runs(generation, before=""):
        (tmp_path / "script.py").write_text(SCRIPT.format(before=before))
        env = {"TORCHELASTIC_ERROR_FILE": fell(tmp_path, generation, "")}
        command = [sys.executable, "-S", "script.py"]
        path = {"PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run(
            command, cwd=tmp_path, env=env | path, stderr=subprocess.PIPE, text=True
        )
        assert done.returncode == 1
        return done.stderr

    assert runs(0).startswith("Traceback (most recent call last):")
    assert runs(1) == ("ValueError: boom (the same traceback as in generation 0, 2 times now)\n")
    assert runs(2, "sys.excepthook = lambda *_: print('mine', file=sys.stderr)") == "mine\n"
