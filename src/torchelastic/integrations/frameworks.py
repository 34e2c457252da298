"""Import training frameworks, which are optional dependencies, when they are needed."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def find(*names: str) -> Any:
    """Import the first available module; prefers one that the script has already imported.

    Untyped on purpose: type checkers run where the frameworks are not installed.
    """
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in _prefixes(name):
                raise  # it is installed, but one of its own imports is missing
    package = names[0].partition(".")[0]
    raise ModuleNotFoundError(
        f"This integration needs {package}, which is not installed: pip install {package}.",
        name=package,
    )


def _prefixes(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[: count + 1]) for count in range(len(words))]
