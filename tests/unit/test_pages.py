"""The files and modules that pages name exist."""

import re
from pathlib import Path

import torchelastic

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
#: A path in backticks that begins with a folder of ours.
TREES = "|".join(
    sorted(p.name for p in (ROOT / "src/torchelastic").iterdir() if (p / "__init__.py").exists())
)


def test_the_modules_that_pages_name_exist():
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(rf"`((?:{TREES})/[\w/]+\.py)`", page.read_text())
        if not (ROOT / "src/torchelastic" / name).exists()
    ]
    assert missing == []


def test_links_out_of_the_site_hold():
    """Sphinx checks those between pages; these are to files, and from the files beside the code."""
    files = [
        *PAGES,
        *ROOT.glob("*.md"),
        ROOT / "benchmarks/README.md",
        *(ROOT / "src").rglob("*.md"),
    ]
    dead = [
        f"{file.relative_to(ROOT)}: {target}"
        for file in files
        for target in re.findall(r"\]\(([^)\s#:]+)[)#]", file.read_text())
        if not (file.parent / target).exists()
    ]
    assert dead == []


def test_there_is_one_version():
    for file in ("pyproject.toml", "CITATION.cff"):
        (version,) = re.findall(r"^version\W+([\w.]+)", (ROOT / file).read_text(), re.MULTILINE)
        assert version == torchelastic.__version__, file
