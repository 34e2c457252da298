"""Run our code in `python -u train.py` without being on its command line.

While Python starts, before it looks at train.py, it imports a module named `sitecustomize` if it
finds one. `environment` puts the directory of ours at the head of PYTHONPATH; it only calls
`begin`. Everything a program could see of this is gone when `begin` ends, and Python itself
then runs train.py: no `runpy`, no imitation of `__main__`, no frame of ours below it.

A worker gets its failure report here. The zygote never gets further: it forks, and the copies do.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

from torchelastic import env as environ

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
VARIABLE = "TORCHELASTIC_STARTUP"
#: Roles of a Python, with a descriptor.
ZYGOTE, CAREFUL_ZYGOTE = "zygote", "careful-zygote"


def environment(env: Mapping[str, str], role: str) -> dict[str, str]:
    """The environment for a Python that is to be a `worker`, or a zygote with its descriptor:
    `zygote:5`."""
    path = env.get("PYTHONPATH")
    return {
        **env,
        VARIABLE: role,
        "PYTHONPATH": f"{DIRECTORY}{os.pathsep}{path}" if path else DIRECTORY,
    }


def begin() -> None:
    """Become what the environment says, then leave `site` as if we had not been there."""
    role = _take_traces_away()
    try:
        found = _import_theirs()
    finally:  # `site` reports an error in the user's sitecustomize, and Python continues
        _become(role)
    if not found:
        raise ImportError("No module named 'sitecustomize'", name="sitecustomize")


def _take_traces_away() -> str:
    """Restore the environment and the module path; returns the role."""
    env = environ.snapshot()
    role = env.pop(VARIABLE, "")
    path = env.pop("PYTHONPATH", "").removeprefix(DIRECTORY).removeprefix(os.pathsep)
    environ.replace({**env, "PYTHONPATH": path} if path else env)
    sys.path[:] = [entry for entry in sys.path if entry != DIRECTORY]
    sys.path_importer_cache.pop(DIRECTORY, None)
    return role


def _import_theirs() -> bool:
    """Import the user's `sitecustomize`, which ours has hidden; False if there is none."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return False
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
    return True


def _become(role: str) -> None:
    """A failure here ends the process: the zygote must never run the user's program itself."""
    try:
        kind, _, descriptor = role.partition(":")
        if kind in (ZYGOTE, CAREFUL_ZYGOTE):
            from torchelastic.agent.spawn import zygote_server

            # Returns in workers only.
            zygote_server.serve(int(descriptor), careful=kind == CAREFUL_ZYGOTE)
        elif role == "worker":
            from torchelastic.worker import bootstrap

            bootstrap.attach()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
