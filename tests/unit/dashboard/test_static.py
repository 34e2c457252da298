"""The page's files: small, without a way for users' texts to become markup, and complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchelastic

STATIC = Path(torchelastic.__file__).parent / "dashboard" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
#: What makes markup or code of a text, or a style that the policy of the page forbids.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\(|new Function|"
    r"setHTML|createContextualFragment|srcdoc|\bstyle:|\.style\b|javascript:"
)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_small_and_makes_no_markup(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    assert max(map(len, text.splitlines())) <= 100
    assert FORBIDDEN.findall(text) == []


def test_what_the_page_asks_for_is_there_and_from_here():
    html = (STATIC / "index.html").read_text()
    asked = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert all((STATIC.parent / path).is_file() for path in asked)
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=", html)
    for path in SCRIPTS:
        for name in re.findall(r'from "([^"]+)"', path.read_text()):
            assert (STATIC / name).is_file(), f"{path.name}: {name}"
    assert not re.search(r"url\(|@import", (STATIC / "style.css").read_text())


def test_the_document_is_changed_in_one_place():
    own = ("tree.js", "page.js", "connection.js")
    touching = [
        path.name for path in SCRIPTS if re.search(r"\bdocument\.|window\.", path.read_text())
    ]
    assert set(touching) <= set(own)
