from __future__ import annotations

import io

from torchelastic.cli.terminal import show


def test_characters_the_terminal_lacks_are_written_out():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show("naïve \x1b", stream=stream)
    assert raw.getvalue() == b"na\\xefve \\x1b\n"
