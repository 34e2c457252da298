from __future__ import annotations

import pytest

from torchelastic.agent.output.terminal_text import one_line, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, with\ttabs\nand lines: äöü 漢字 🙂", None),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("over\rwritten", r"over\rwritten"),
        ("back\x08space\x7f", r"back\x08space\x7f"),
        ("nul\x00", r"nul\x00"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("a\u2028b\u2066c\u200f", r"a\u2028b\u2066c\u200f"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_what_a_terminal_would_act_on_is_written_out(text, shown):
    assert plain(text) == (text if shown is None else shown)


def test_one_line_is_one_line():
    assert one_line("a\nb\tc\r\nd") == r"a b c\r d"
