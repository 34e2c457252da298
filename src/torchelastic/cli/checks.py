"""Checks of files, modules and directories before anything is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from torchelastic.config import Entry
from torchelastic.errors import ConfigError


def check_platform() -> None:
    if sys.platform != "linux":
        raise ConfigError(f"torchelastic runs on Linux only; this machine is {sys.platform}.")


def check_entry(entry: Entry, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if no worker could run `entry`."""
    if "${" in entry.target:
        return  # each worker replaces it with its own value
    if entry.kind == "script":
        _check_script(entry.target)
    elif entry.kind == "program":
        _check_program(entry.target, environ)
    elif not environ.get("PYTHON_EXEC"):  # another Python may have other modules
        _check_module(entry.target)


def check_preload(names: tuple[str, ...], entry: Entry) -> None:
    """Raise ConfigError for a module that is neither importable nor beside the script."""
    beside = [os.path.dirname(os.path.abspath(entry.target))] if entry.kind == "script" else []
    for name in names:
        if not _module_exists(name, [*beside, os.getcwd()]):
            raise ConfigError(
                f"--preload: module '{name}' not found: install it or correct the name."
            )


def prepare_log_dir(path: str | None) -> None:
    """Create the log directory if needed; raise ConfigError if it cannot be used."""
    if path is None or path == os.devnull:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--log-dir {path} is not a directory: use another one.") from None
    except OSError as error:
        raise ConfigError(
            f"--log-dir {path} cannot be created ({error.strerror}): use another one."
        ) from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"--log-dir {path} is not readable and writable: change its permissions or use another "
            "one."
        )


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        raise ConfigError(f"Script '{path}' not found in {os.getcwd()}: correct the path.")
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise ConfigError(f"'{path}' is a directory without __main__.py: name a script.")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"Script '{path}' is not readable: change its permissions.")


def _check_program(name: str, environ: Mapping[str, str]) -> None:
    # Imported here: it imports compression modules.
    import shutil

    if shutil.which(name, path=environ.get("PATH")) is None:
        raise ConfigError(
            f"Program '{name}' not found: correct the name, make the file executable, or remove "
            "--no-python if it is a Python script."
        )


def _check_module(name: str) -> None:
    if name.endswith(".py"):
        raise ConfigError(f"'{name}' is a file, not a module: remove -m.")
    if not _module_exists(name, [os.getcwd()]):
        raise ConfigError(
            f"Module '{name}' not found: install it, correct the name, or start in a directory "
            f"where `python -m {name}` works."
        )


def _module_exists(name: str, first: list[str]) -> bool:
    """Look for the outermost package of a module, without importing anything."""
    import importlib.machinery
    import importlib.util

    top = name.partition(".")[0]
    try:
        if importlib.machinery.PathFinder.find_spec(top, first) is not None:
            return True
        return importlib.util.find_spec(top) is not None
    except ValueError:  # an empty name, or a loaded module without a spec
        return False
