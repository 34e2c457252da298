"""The launchers side by side: a command line and an environment each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

_BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Launcher:
    """One launcher in one setting."""

    name: str
    program: tuple[str, ...]
    #: For every job, and for jobs of several nodes only.
    flags: tuple[str, ...] = ()
    elastic_flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Seconds after which a job that does not train, and one that has not recovered, has failed.
    start_patience: float = 45.0
    patience: float = 45.0

    def elastic(
        self, nodes: str, workers: int, endpoint: str, job: str, script: Sequence[str]
    ) -> list[str]:
        """The command of one node of a job of several."""
        meeting = ["--nnodes", nodes, "--rdzv-id", job, "--rdzv-endpoint", endpoint]
        return self._command(workers, [*self.elastic_flags, *meeting], script)

    def single(self, workers: int, script: Sequence[str]) -> list[str]:
        """The command of a job of one node."""
        return self._command(workers, [], script)

    def _command(self, workers: int, flags: Sequence[str], script: Sequence[str]) -> list[str]:
        return [
            *self.program,
            *self.flags,
            *flags,
            "--nproc-per-node",
            str(workers),
            *script,
        ]


def _ours(name: str, *flags: str) -> Launcher:
    return Launcher(name, (str(_BIN / "torchelastic"), "run"), flags)


def _torchrun(name: str, conf: str = "", **environment: str) -> Launcher:
    # Without --local-addr it would look up the machine's name and train over its network card.
    elastic = ("--rdzv-backend", "c10d", "--max-restarts", "100")
    return Launcher(
        name,
        (str(_BIN / "torchrun"),),
        ("--local-addr", "127.0.0.1"),
        (*elastic, "--rdzv-conf", conf) if conf else elastic,
        environment,
    )


_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

OURS = _ours("torchelastic")
OURS_PRELOAD = _ours("torchelastic --preload", "--preload", "slow_import")
OURS_NO_ZYGOTE = _ours("torchelastic --no-zygote", "--no-zygote")
SAFE = _torchrun("torchrun safe", "last_call_timeout=1", **_OWN_STORE)
FAST = replace(
    _torchrun(
        "torchrun fast",
        "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2",
        **_OWN_STORE,
    ),
    # Where it recovered it took up to 12 s; jobs it split were still split after 45 to 60 s.
    patience=30.0,
)
# A round below the maximum of nodes waits 30 s for others: at the start, and after a failure.
STOCK = replace(_torchrun("torchrun stock"), start_patience=100.0, patience=60.0)
TORCHRUN = _torchrun("torchrun")
