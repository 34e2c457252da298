"""Table tests that show all wrong cases at once, each with the actual result."""

import re
from collections.abc import Callable, Iterable, Sequence

from torchelastic.errors import ConfigError

Cases = Iterable[Sequence[object]]


def wrong(call: Callable, cases: Cases) -> list[tuple]:
    """Return the cases whose last item differs from what `call` returns for the others."""
    return [
        (*given, expected, found)
        for *given, expected in cases
        if (found := _outcome(call, given)) != expected
    ]


def not_refused(call: Callable, cases: Cases) -> list[tuple]:
    """Return the cases that are not rejected with a one-line error matching their last item."""
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
