"""Finding frameworks that may not be installed."""

import subprocess
import sys

import pytest

from torchelastic.integrations import frameworks


def test_a_module_that_is_there():
    assert frameworks.find("no_such_thing.at_all", "json.decoder") is sys.modules["json.decoder"]


def test_a_missing_one_is_named_with_what_to_do():
    with pytest.raises(ModuleNotFoundError) as caught:
        frameworks.find("no_such_thing.pytorch", "nor_this")
    assert str(caught.value) == (
        "This integration needs no_such_thing, which is not installed: pip install no_such_thing."
    )


def test_one_that_lacks_something_itself_says_what(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)
    assert frameworks.find("lacking", "json") is sys.modules["json"], "imported already"
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_thing'"):
        frameworks.find("lacking")


def test_packages_import_nothing_heavy_that_nobody_has_asked_for():
    code = (
        "import sys, torchelastic.integrations, torchelastic.distributed as d; dir(d)\n"
        "import torchelastic.metrics, torchelastic.metrics.prometheus\n"
        "print(sys.modules.keys() & {'torch', 'prometheus_client'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == "set()\n", done.stderr
