"""Cases by table: all that are wrong are shown at once, each with what was found instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from torchelastic.errors import ConfigError

Cases = Iterable[Sequence[object]]


def wrong(call: Callable, cases: Cases) -> list[tuple]:
    """The cases whose last item is not what `call` makes of the items before it."""
    return [
        (*given, expected, found)
        for *given, expected in cases
        if (found := _outcome(call, given)) != expected
    ]


def not_refused(call: Callable, cases: Cases) -> list[tuple]:
    """The cases that are not refused in one line with the words of their last item."""
    return [
        (*given, words, found)
        for *given, words in cases
        if not isinstance(found := _outcome(call, given), ConfigError)
        or not re.search(words, str(found))
        or "\n" in str(found)
    ]


def _outcome(call: Callable, given: Sequence[object]) -> object:
    try:
        return call(*given)
    except Exception as error:
        return error
