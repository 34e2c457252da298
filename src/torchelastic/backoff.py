"""The pause before something that has failed is tried again."""


def pause(failures: int, first: float, longest: float) -> float:
    """Return the seconds to wait after so many failures in a row: doubled each time, up to a limit.

    >>> [pause(failures, 0.5, 60.0) for failures in (0, 1, 2, 3, 9999)]
    [0.0, 0.5, 1.0, 2.0, 60.0]
    """
    return min(first * 2.0 ** min(failures - 1, 30), longest) if failures > 0 else 0.0
