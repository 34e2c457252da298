"""The page's own files, as they are installed."""

from pathlib import Path

import pytest

from torchelastic.dashboard import files

ROOT = Path(__file__).parents[3]


def test_the_page_and_what_it_loads_are_there():
    found = files.load()
    assert found["/"].content_type == "text/html; charset=utf-8"
    assert found["/"].body.lstrip().lower().startswith(b"<!doctype html>")
    assert all(path == "/" or path.startswith("/static/") for path in found)
    assert "/static/index.html" not in found


def test_everything_in_the_directory_is_served_and_installed():
    static = ROOT / "src/torchelastic/dashboard/static"
    names = {path.name for path in static.iterdir()}
    served = {path.rpartition("/")[2] or "index.html" for path in files.load()}
    assert served == names
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = project["tool"]["setuptools"]["package-data"]["torchelastic"]
    assert "dashboard/static/*" in shipped


def test_the_page_needs_nothing_that_its_policy_forbids():
    """No inline script or style, nothing from elsewhere."""
    text = files.load()["/"].body.decode().lower()
    assert "style=" not in text
    assert "<style" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    for part in text.split("<script")[1:]:
        assert "src=" in part.partition(">")[0]
