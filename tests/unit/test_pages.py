"""Generated pages are current; the files, modules and commands that pages name exist."""

import re
import shlex
from pathlib import Path

import pytest

import torchelastic
from scripts import reference
from torchelastic.cli.command_table import BY_NAME
from torchelastic.cli.parser import parse
from torchelastic.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PACKAGE = ROOT / "src/torchelastic"
#: Files and folders of ours in backticks: below the package, below the checkout, and test files.
TREES = "|".join(sorted(p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()))
NAMED = re.compile(rf"`((?:{TREES})/(?:[\w/]+\.py|(?:\w+/)*))`")
BESIDE = re.compile(
    r"`(?:\./)?((?:src|tests|scripts|benchmarks|examples|deploy|docs|\.ci)/[^`\s:]*)[`\s:]"
)
#: The page of old APIs names a test of torch.
TEST_FILES = re.compile(r"(?<!torch's )`(test_\w+\.py)`")


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_pages_are_current(name):
    written = (ROOT / "docs" / name).read_text()
    assert written == reference.PAGES[name](), "run: python -m scripts.reference"


def test_files_and_folders_that_pages_name_exist():
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    missing = []
    for page in [*PAGES, *ROOT.glob("*.md"), ROOT / "benchmarks/README.md"]:
        text = page.read_text()
        absent = [name for name in NAMED.findall(text) if not (PACKAGE / name).exists()]
        absent += [name for name in BESIDE.findall(text) if not any(ROOT.glob(name))]
        absent += [name for name in TEST_FILES.findall(text) if name not in tests]
        missing += [f"{page.relative_to(ROOT)}: {name}" for name in absent]
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


def test_commands_on_pages_are_accepted():
    """Every command and flag exists, and the values are valid."""
    commands = [
        (page.relative_to(ROOT), command)
        for page in [*PAGES, ROOT / "README.md"]
        for block in re.findall(r"```(?:bash|console|sh)\n(.*?)```", page.read_text(), re.DOTALL)
        for command in re.findall(
            r"^(?:\$ )?torchelastic ([a-z].*)$", block.replace("\\\n", " "), re.MULTILINE
        )
        if "…" not in command
    ]
    assert len(commands) > 30
    for page, command in commands:
        # What comes after a pipe or a redirection is the shell's.
        words = re.split(r" (?:[|>&]|2>)", command, maxsplit=1)[0]
        first, *rest = shlex.split(words, comments=True)
        name = first if first in BY_NAME else f"{first} {rest.pop(0)}"
        try:
            parse(rest, BY_NAME[name], {})
        except (ConfigError, KeyError) as refused:
            pytest.fail(f"{page}: {command}: {refused}")
