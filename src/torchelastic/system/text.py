"""Texts of others in one printable line. Pure."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace characters that a terminal or a log should not show, such as ends of lines.

    >>> printable("no\\nsecret")
    'no?secret'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)
