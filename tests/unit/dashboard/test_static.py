"""The page's files: small, without a way for users' texts to become markup, and complete."""

from __future__ import annotations

import re
from pathlib import Path

import torchelastic
from torchelastic.dashboard import responses

STATIC = Path(torchelastic.__file__).parent / "dashboard" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
#: What makes markup or code of a text, or a style that the policy of the page forbids.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\(|new Function|"
    r"setHTML|createContextualFragment|srcdoc|\bstyle:|\.style\b|javascript:"
)


def test_a_script_is_small_and_makes_no_markup():
    for path in SCRIPTS:
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path.name
        assert max(map(len, text.splitlines())) <= 100, path.name
        assert FORBIDDEN.findall(text) == [], path.name


def test_page_loads_only_its_own_existing_files():
    html = (STATIC / "index.html").read_text()
    asked = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert all((STATIC.parent / path).is_file() for path in asked)
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=", html)
    assert not re.search(r"https?://(?!www\.w3\.org)", html)
    for path in SCRIPTS:
        for name in re.findall(r'from "([^"]+)"', path.read_text()):
            assert (STATIC / name).is_file(), f"{path.name}: {name}"
    assert not re.search(r"url\(|@import", (STATIC / "style.css").read_text())


def test_everything_in_the_directory_is_served_and_installed():
    found = responses.load_files()
    assert found["/"].content_type == "text/html; charset=utf-8"
    assert found["/"].body.lstrip().lower().startswith(b"<!doctype html>")
    paths = {f"/static/{path.name}" for path in STATIC.iterdir()} - {"/static/index.html"}
    assert set(found) == paths | {"/"}
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert re.search(r'^torchelastic = \[.*"dashboard/static/\*".*\]$', project, re.MULTILINE)


def test_the_document_is_changed_in_one_place():
    own = ("tree.js", "page.js", "connection.js")
    touching = [
        path.name for path in SCRIPTS if re.search(r"\bdocument\.|window\.", path.read_text())
    ]
    assert set(touching) <= set(own)
