"""Find out how much of a module can be preloaded, if not all of it.

A module that starts a thread or uses the GPU when it is imported cannot be in a process that forks.
Often it is imported by another one, which is most of the work: `transformers.trainer` imports
`datasets`, and that imports pyarrow. A copy of the zygote imports it first and tells which modules
were complete before.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torchelastic.system import linux


@dataclass
class Findings:
    """The effects of importing a module."""

    #: The modules that were imported before the culprit, in their order.
    complete: list[str] = field(default_factory=list)
    #: The innermost module that makes the process unfit to fork, and why; empty if none does.
    culprit: str = ""
    reason: str = ""
    #: How long the whole import takes.
    seconds: float = 0.0


def probe(name: str, unfit: Callable[[], str]) -> Findings:
    """Import a module in a copy of this process. `unfit` returns why that could not be forked."""
    out, into = os.pipe()
    zygote = os.getpid()
    copy = os.fork()
    if copy == 0:
        try:
            linux.die_with_parent(zygote)
            os.close(out)
            with open(into, "w") as file:
                json.dump(asdict(_import(name, unfit)), file)
        finally:
            os._exit(0)
    os.close(into)
    with open(out) as file:
        told = file.read()
    os.waitpid(copy, 0)
    return Findings(**json.loads(told)) if told else Findings([], name, "ends the process")


def safe(findings: Findings, loaded: Collection[str]) -> list[str]:
    """The modules to preload: those whose packages are complete or `loaded`, too, since Python
    imports these first.

    >>> safe(Findings(["json", "a", "a.b", "data.util"], "data", "starts a thread"), ["sys"])
    ['json', 'a', 'a.b']
    """
    known = {*findings.complete, *loaded}
    return [name for name in findings.complete if known.issuperset(_packages(name))]


def _packages(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _import(name: str, unfit: Callable[[], str]) -> Findings:
    watch = _ImportWatch(name, unfit)
    sys.meta_path.insert(0, watch)
    began = time.monotonic()
    with contextlib.suppress(Exception, SystemExit):  # the zygote reports that
        importlib.import_module(name)
    watch.found.seconds = time.monotonic() - began - watch.looked
    watch.look()
    return watch.found


class _ImportWatch:
    """A finder that looks at the process before and after each module runs."""

    def __init__(self, name: str, unfit: Callable[[], str]) -> None:
        self.found = Findings()
        self._unfit = unfit
        #: The modules that are being imported, the innermost last.
        self._running = [name]
        #: Seconds spent in looking.
        self.looked = 0.0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        if loader is None or isinstance(loader, type):
            return  # a namespace, or built into Python
        create, run = loader.create_module, loader.exec_module

        def create_module(spec: ModuleSpec) -> ModuleType | None:  # loads a shared library
            with self._watched(spec.name):
                made: ModuleType | None = create(spec)
                return made

        def exec_module(module: ModuleType) -> None:
            with self._watched(spec.name):
                run(module)
            if not self.found.culprit:
                self.found.complete.append(spec.name)

        loader.create_module, loader.exec_module = create_module, exec_module

    @contextlib.contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        self.look()  # what was done until here is done by the module that imports this one
        self._running.append(name)
        try:
            yield
            self.look()
        finally:
            self._running.pop()

    def look(self) -> None:
        """Blame the innermost module if the process is now unfit to fork."""
        if self.found.culprit:
            return
        began = time.monotonic()
        self.found.reason = self._unfit()
        self.looked += time.monotonic() - began
        if self.found.reason:
            self.found.culprit = self._running[-1]
