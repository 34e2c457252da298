"""Escape users' texts for a terminal. Pure.

A job's name, an exception's message or a line of a log may hold sequences that move the cursor,
retitle the window or change the writing direction. They are shown, not executed.
"""

from __future__ import annotations

import re

#: Control characters except line feed and tab; marks that change the writing direction or end a
#: line; surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def plain(text: str) -> str:
    r"""The text with everything a terminal would act on written out.

    >>> plain("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """The same, in one line.

    >>> one_line("a\\nb")
    'a b'
    """
    return plain(" ".join(text.split("\n")).replace("\t", " "))
