"""The examples of batch-policy.md, data.md and ledger.md run, and print what they say."""

import re
from pathlib import Path

import pytest

from torchelastic.data import checker

DOCS = Path(__file__).parents[3] / "docs/guides"


def blocks(page, kind):
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize("page", ["batch-policy.md", "data.md"])
def test_examples_run(page):
    exec(compile("\n".join(blocks(page, "python")), page, "exec"), {})


def test_the_checker_says_what_the_page_shows(capsys):
    exec("\n".join(blocks("ledger.md", "python")), {})
    (shown,) = blocks("ledger.md", "console")
    command, _, output = shown.partition("\n")
    assert checker.main(command.split()[4:]) == 0
    assert capsys.readouterr().out == output
    (line,) = blocks("ledger.md", "json")
    assert isinstance(checker.parse(line.encode()), checker.Line)
