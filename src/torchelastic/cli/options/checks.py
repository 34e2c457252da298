"""What can be seen to be wrong before anything is started: files, modules, directories."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from torchelastic.config import Entry
from torchelastic.errors import ConfigError


def check_platform() -> None:
    if sys.platform != "linux":
        raise ConfigError(f"torchelastic runs on Linux only, and this is {sys.platform}.")


def check_entry(entry: Entry, environ: Mapping[str, str]) -> None:
    """Refuse what no worker could run."""
    if "${" in entry.target:
        return  # only a worker knows what this will be
    if entry.kind == "script":
        _check_script(entry.target)
    elif entry.kind == "program":
        _check_program(entry.target, environ)
    elif not environ.get("PYTHON_EXEC"):  # another Python may have other modules
        _check_module(entry.target)


def check_preload(names: tuple[str, ...], entry: Entry) -> None:
    """Refuse modules that cannot be found; they may lie beside the script."""
    beside = [os.path.dirname(os.path.abspath(entry.target))] if entry.kind == "script" else []
    for name in names:
        if not _module_exists(name, [*beside, os.getcwd()]):
            raise ConfigError(
                f"--preload: there is no module '{name}' here: install it or correct the name."
            )


def prepare_log_dir(path: str | None) -> None:
    """Make the log directory, if need be, and refuse one that cannot be used."""
    if path is None or path == os.devnull:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--log-dir {path} is not a directory: name another one.") from None
    except OSError as error:
        raise ConfigError(
            f"--log-dir {path} cannot be made ({error.strerror}): name another one."
        ) from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"--log-dir {path} cannot be read and written: change its permissions or name another "
            "one."
        )


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        raise ConfigError(f"There is no script '{path}' in {os.getcwd()}: correct the path.")
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise ConfigError(f"'{path}' is a directory without __main__.py: name a script.")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"The script '{path}' cannot be read: change its permissions.")


def _check_program(name: str, environ: Mapping[str, str]) -> None:
    # Imported here: it brings compression modules along.
    import shutil

    if shutil.which(name, path=environ.get("PATH")) is None:
        raise ConfigError(
            f"There is no program '{name}' to run: correct the name, make the file executable, or "
            "leave --no-python out if it is a Python script."
        )


def _check_module(name: str) -> None:
    if name.endswith(".py"):
        raise ConfigError(f"'{name}' is a file, no module: leave -m out.")
    if not _module_exists(name, [os.getcwd()]):
        raise ConfigError(
            f"There is no module '{name}' here: install it, correct the name, or start where "
            f"`python -m {name}` works."
        )


def _module_exists(name: str, first: list[str]) -> bool:
    """Whether the outermost package of a module can be found, without importing anything."""
    import importlib.machinery
    import importlib.util

    top = name.partition(".")[0]
    try:
        if importlib.machinery.PathFinder.find_spec(top, first) is not None:
            return True
        return importlib.util.find_spec(top) is not None
    except ValueError:  # an empty name, or a module that hides where it comes from
        return False
