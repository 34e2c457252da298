"""Who keeps the workload of `in_process.py` training, in which settings, and how it starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.job import Job
from benchmarks.harness.launchers import OURS, SAFE, Launcher

WORKERS = 4
MEMORY = Path("/dev/shm")  # a file system in memory: the fastest place for a checkpoint
#: Python packages of one peer each, for the interpreter and the torch that run this benchmark.
PEERS = Path(__file__).resolve().parent.parent.parent / ".venv-peers"
#: What each peer is installed from: itself without dependencies, so that torch stays as it is, and
#: what it needs besides torch.
_OPEN_TELEMETRY = ("opentelemetry-exporter-otlp-proto-http",)
PACKAGES = {
    "torchft-0.2.0": ("torchft==0.2.0", _OPEN_TELEMETRY),
    "torchft-nightly": ("torchft-nightly==2026.10.26", _OPEN_TELEMETRY),
    "nvrx": (
        "nvidia-resiliency-ext==0.4.1",
        ("defusedxml", "nvidia-ml-py", "packaging", "psutil", "pynvml", "pyyaml"),
    ),
}
#: Limits of torchft's lighthouse: five times shorter than those it ships with, and more.
TORCHFT_LIMITS = ("--heartbeat_timeout_ms=1000", "--join_timeout_ms=1000", "--quorum_tick_ms=10")
TORCHFT_NOTE = "heartbeat time-out 1 s, join time-out 1 s, tick 10 ms"
#: A step of the large model takes half a second on two cores: below this, none would be committed.
LONG_COLLECTIVE = 5.0
#: Processes nobody's launcher starts get what launchers set; torch's warnings of every store wait
#: that ended are hushed.
BY_HAND = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Contestant:
    """A way to keep four workers training."""

    launcher: Launcher
    #: Its settings, in a sentence for the report.
    note: str
    script: str
    begin: Callable[[Job], None]
    arguments: tuple[str, ...] = ()
    #: Starts what took the place of a killed worker; by itself, if the contestant does that.
    replace_worker: Callable[[Job, int], None] | None = None
    #: How many faults one job can take.
    faults_per_job: int = 5
    #: Seconds a collective may take where the script says so: as short as the small model allows.
    collective_timeout: float = LONG_COLLECTIVE
    #: Ranks that are killed in turn.
    victims: tuple[int, ...] = (3, 0, 2, 1)

    @property
    def name(self) -> str:
        return self.launcher.name

    def job(
        self,
        size: str,
        nodes: str = "1:1",
        workers: int = WORKERS,
        address: str = "127.0.0.1",
    ) -> Job:
        """A job of this contestant's, checkpoints in memory; nothing of it runs yet."""
        timeout = self.collective_timeout if size == "1m" else LONG_COLLECTIVE
        return Job(
            self.launcher,
            self.script,
            (f"--size={size}", f"--collective-timeout={timeout}", *self.arguments),
            workers=workers,
            nodes=nodes,
            address=address,
            parent=MEMORY,
        )


def install(peers: Path = PEERS) -> None:
    """Install what is missing, each peer to a directory of its own. Nothing else is touched."""
    for name, (package, needs) in PACKAGES.items():
        target = peers / name
        if (target / "complete").exists():
            continue
        # The peer comes last: an upgrade replaces `bin` whole, and what it needs has programs, too.
        for packages in (needs, ["--no-deps", package]):
            command = ["-m", "pip", "install", "--quiet", "--upgrade", "--target", str(target)]
            subprocess.run([sys.executable, *command, *packages], check=True)
        (target / "complete").touch()


def _start_node(job: Job) -> None:
    job.start_node()


def _start_torchft(*flags: str) -> Callable[[Job], None]:
    """One lighthouse and a process per replica group, of one worker each."""

    def start(job: Job) -> None:
        start_lighthouse(job, *flags)
        for replica in range(WORKERS):
            _start_replica(job, replica)

    return start


def start_lighthouse(job: Job, *flags: str) -> None:
    """Start what keeps the quorum of a job of torchft's."""
    home = Path(job.launcher.environment["PYTHONPATH"])
    lighthouse = [sys.executable, str(home / "bin" / "torchft_lighthouse")]
    job.start([*lighthouse, "--bind", job.endpoint, "--min_replicas", "1", *flags], {})


def _start_replica(job: Job, replica: int) -> None:
    where = {"REPLICA_GROUP_ID": str(replica), "TORCHFT_LIGHTHOUSE": f"http://{job.endpoint}"}
    job.start([sys.executable, *job.script], {**BY_HAND, **where})


def _replace_replica(job: Job, pid: int) -> None:
    """torchft starts no process: whoever does starts the lost one anew, under a name of its own."""
    _start_replica(job, len(job.nodes))


def _start_nvrx(job: Job) -> None:
    """Five processes: four active ranks and the spare. No launcher, which would end them all."""
    address, port = job.endpoint.split(":")
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port}
    size = {"WORLD_SIZE": str(WORKERS + 1)}
    for rank in map(str, range(WORKERS + 1)):
        who = {"RANK": rank, "LOCAL_RANK": rank}
        job.start([sys.executable, *job.script], {**BY_HAND, **meeting, **size, **who})


def _torchft(
    version: str, title: str, lighthouse: str, *flags: str, gloo: float = LONG_COLLECTIVE
) -> Contestant:
    return Contestant(
        Launcher(
            f"torchft {version}, {title}",
            (),
            environment=peer_home(f"torchft-{version}"),
            patience=15.0,  # where it recovered it took up to 5.2 s; else its survivors were gone
        ),
        f"lighthouse: {lighthouse}; gloo time-out {gloo:g} s; a killed replica is started anew "
        "when the others have gone on",
        "peers/torchft_train.py",
        _start_torchft(*flags),
        replace_worker=_replace_replica,
        collective_timeout=gloo,
    )


def peer_home(peer: str) -> dict[str, str]:
    """The environment in which a peer is found."""
    return {"PYTHONPATH": str(PEERS / peer)}


def _torchft_variants(version: str) -> tuple[Contestant, Contestant]:
    return (
        _torchft(version, "heartbeat 1 s", TORCHFT_NOTE, *TORCHFT_LIMITS, gloo=1.0),
        _torchft(version, "as shipped", "as shipped (heartbeat time-out 5 s, join time-out 60 s)"),
    )


OURS_IN_PROCESS = Contestant(
    OURS, "`torchelastic run --nproc-per-node 4`, no other flags", "resident_train.py", _start_node
)
TORCHRUN_TUNED = Contestant(
    replace(SAFE, name="torchrun tuned", flags=(*SAFE.flags, "--monitor-interval", "0.1")),
    "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, `--monitor-interval 0.1`, `last_call_timeout=1`, "
    "checkpoint to memory every 5 steps",
    "ddp_train.py",
    _start_node,
)
TORCHFT = (*_torchft_variants("0.2.0"), *_torchft_variants("nightly"))
#: The fastest found. Both limits are shorter than many a pause of a healthy worker.
TORCHFT_SHORT = _torchft(
    "nightly",
    "short limits",
    "join time-out 0.1 s (who asks later than that is left out of the step), tick 10 ms",
    *("--join_timeout_ms", "100", "--quorum_tick_ms", "10"),
    gloo=0.3,
)
NVRX = Contestant(
    Launcher("NVRx 0.4.1 in-process", (), environment=peer_home("nvrx")),
    "one spare, everything imported; all intervals 50 ms, `last_call_wait` 0, gloo time-out 0.5 s, "
    "checkpoint to memory every 5 steps; rank 0, which hosts its store, is spared",
    "peers/nvrx_train.py",
    _start_nvrx,
    arguments=(f"--active={WORKERS}",),
    faults_per_job=1,
    collective_timeout=0.5,
    victims=(3, 2, 1),
)
PEER_CONTESTANTS: Sequence[Contestant] = (TORCHRUN_TUNED, *TORCHFT, TORCHFT_SHORT, NVRX)
