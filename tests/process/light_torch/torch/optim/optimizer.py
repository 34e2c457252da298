"""Hooks that are called after every step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

hooks: list[Callable[..., None]] = []


def register_optimizer_step_post_hook(hook: Callable[..., None]) -> Any:
    hooks.append(hook)
    return SimpleNamespace(remove=lambda: hooks.remove(hook))
