"""Training frameworks are no dependency of ours: they are looked for when they are needed."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def find(*names: str) -> Any:
    """The first of some modules, one that the script has imported already if there is one.

    Untyped on purpose: type checkers run where the frameworks are not installed.
    """
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in _prefixes(name):
                raise  # it is there, and lacks something itself
    package = names[0].partition(".")[0]
    raise ModuleNotFoundError(
        f"This integration needs {package}, which is not installed: pip install {package}.",
        name=package,
    )


def _prefixes(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[: count + 1]) for count in range(len(words))]
