"""Bad messages over real sockets, while those who mean well go on undisturbed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from tests.process.jobs import Job, Node, job
from tests.support import SOAK, poll_for
from torchelastic.agent.telemetry.collector import NOTHING, CollectedLog, LogCollector
from torchelastic.agent.telemetry.shipper import RemoteSink
from torchelastic.clock import SystemClock
from torchelastic.rendezvous.embedded import EmbeddedServer, EmbeddedStore
from torchelastic.snapshot import layout
from torchelastic.snapshot.node.memory import SnapshotMemory
from torchelastic.snapshot.node.replicator import Replicator
from torchelastic.transport import frames
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.auth import Credentials, Secret
from torchelastic.transport.connect import Endpoint, connect_once
from torchelastic.transport.listener import Listener

HERE = Path(__file__).parent
JOB = "job-1"
KEY = b"the secret of this job"
#: Messages by default, and in a turn of the slow test; all with seeds of their own.
FEW, MANY = 2_000, 5_000
#: Turns of the slow test, and seconds of quiet in each.
TURNS, QUIET = 1 + SOAK, 4.0
#: Kilobytes the agent may grow by; what its memory allocator keeps is not given back at once.
GROWTH = 8 * 1024


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


def attack(
    port: int, job_id: str, count: int, seed: int, *more: str, rate: int = 10_000
) -> subprocess.Popen[str]:
    """Start an attacker, with little right to the CPU: it would be on another machine."""
    words = [str(port), job_id, str(count), str(seed), str(rate), *more]
    return subprocess.Popen(
        ["nice", sys.executable, "-m", "tests.process.fuzzer", *words],
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )


@contextlib.asynccontextmanager
async def hosting(secret: Secret | None) -> AsyncIterator[Listener]:
    listener, server = Listener(JOB, secret=secret), EmbeddedServer(JOB)
    listener.serve(frames.STORE, server.admit)
    sockets = bind_endpoint("127.0.0.1", 0)
    assert sockets is not None
    await listener.listen(sockets)
    try:
        yield listener
    finally:
        await listener.close()
        await server.close()


@pytest.mark.parametrize("with_secret", [True, False], ids=["secret", "open"])
def test_a_client_notices_nothing_of_those_who_talk_nonsense(caplog, secret_file, with_secret):
    secret = Secret(KEY) if with_secret else None

    async def work(store: EmbeddedStore, fuzzer: subprocess.Popen[str]) -> int:
        rounds = 0
        while fuzzer.poll() is None:
            await store.put("mine/count", {"n": rounds}, leased=True)
            listing = await store.get("mine/")
            assert listing.items["mine/count"].value == {"n": rounds}
            rounds += 1
            await asyncio.sleep(0.01)
        return rounds

    async def story() -> None:
        more = [str(secret_file)] if with_secret else []
        async with hosting(secret) as listener:
            place = Endpoint("127.0.0.1", listener.port, JOB, Credentials(secret))
            store = await EmbeddedStore.connect([place], timeout=10)
            await store.open_lease(5.0)
            with attack(listener.port, JOB, FEW, 1, *more) as fuzzer:
                rounds = await asyncio.wait_for(work(store, fuzzer), 120)
                sent, admitted = map(int, fuzzer.stdout.read().split())
            assert fuzzer.returncode == 0
            assert sent == FEW
            assert admitted > FEW // 20
            assert rounds > 10
            assert not store.lease_lost.is_set()
            await store.close()

    asyncio.run(story())
    # A callback that raised would be told by asyncio itself.
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    assert len(caplog.records) < 10


def test_snapshots_travel_beside_those_who_talk_nonsense(caplog, secret_file):
    """Also on connections that were admitted: a node gone mad must not stop the others'."""
    shown = Credentials(Secret(KEY))

    async def work(
        ours: Replicator, theirs: SnapshotMemory, place: str, fuzzer: subprocess.Popen[str]
    ) -> int:
        rounds = 0
        while fuzzer.poll() is None:
            rounds += 1
            kept = theirs.memory_for(layout.SHARED, 100_000, 10)
            buffer = kept.memory.begin((5, rounds))
            kept.memory.seal((5, rounds), b"{}", len(buffer), layout.checksum(buffer))
            await ours.fetch(layout.SHARED, (5, rounds), place)
            await asyncio.sleep(0.01)
        return rounds

    async def story() -> None:
        async with hosting(shown.secret) as listener:
            memories = SnapshotMemory(), SnapshotMemory()
            replicators = [Replicator(memory, "node", JOB, shown) for memory in memories]
            listener.serve(frames.SNAPSHOT, replicators[0].admit)
            place = f"127.0.0.1:{listener.port}"
            with attack(listener.port, JOB, FEW, 2, str(secret_file)) as fuzzer:
                working = work(replicators[1], memories[0], place, fuzzer)
                rounds = await asyncio.wait_for(working, 240)
            assert fuzzer.returncode == 0
            assert rounds > 3
            held = {item.version for item in memories[1].holdings()}
            assert (5, rounds) in held
            for replicator, memory in zip(replicators, memories, strict=True):
                await replicator.close()
                memory.close()

    asyncio.run(story())
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_events_are_gathered_beside_those_who_talk_nonsense(caplog, secret_file, tmp_path):
    """Also on connections that were admitted, and with none of their nonsense among the lines."""
    shown = Credentials(Secret(KEY))
    path = tmp_path / "job.jsonl"

    async def tell(port: int, fuzzer: subprocess.Popen[str]) -> int:
        place = Endpoint("127.0.0.1", port, JOB, shown)
        link, answer = await connect_once(place, purpose=frames.EVENTS, timeout=60)
        assert isinstance(answer, frames.Welcome)
        ear, rounds = RemoteSink(link, "node"), 0
        assert (await ear.begin()).upto == NOTHING
        while fuzzer.poll() is None:
            rounds += 1
            assert (await ear.take(b"line %d\n" % rounds, rounds)).upto == rounds
        link.abort()
        return rounds

    async def story() -> None:
        async with hosting(shown.secret) as listener:
            collector = LogCollector(CollectedLog(path), SystemClock())
            listener.serve(frames.EVENTS, collector.admit)
            with attack(listener.port, JOB, FEW, 3, str(secret_file)) as fuzzer:
                rounds = await asyncio.wait_for(tell(listener.port, fuzzer), 240)
            assert fuzzer.returncode == 0
            await collector.close()
        assert path.read_text() == "".join(f"line {number + 1}\n" for number in range(rounds))

    asyncio.run(story())
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


# A job that trains


def steps_at(made: Job, begin: float, end: float) -> list[float]:
    """Seconds between the steps of rank 0 in a stretch of time."""
    times = [line["at"] for line in made.lines(event="step", rank=0)]
    inside = sorted(at for at in times if begin <= at < end)
    return [after - before for before, after in pairwise(inside)]


def resident_memory(pid: int) -> int:
    """Kilobytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"{pid} has no memory")


@pytest.mark.alone
@pytest.mark.slow
def test_a_job_trains_on_under_thousands_of_bad_messages(tmp_path, secret_file):
    """Attacks and quiet take turns: the quiet stretches tell what differs without any attack."""
    flags = f"--nnodes=1:2 --nproc-per-node=2 --settle=0.1 --rdzv-secret-file={secret_file}"
    quiet: list[list[float]] = []
    attacked: list[list[float]] = []
    memory: list[int] = []
    with job(tmp_path / "job", flags, HERE / "resident.py") as made:
        node = started(made)
        for turn in range(TURNS):
            quiet.append(stretch(made, QUIET))
            attacked.append(attack_job(made, secret_file, seed=turn))
            memory.append(resident_memory(node.agent_pid))
        quiet.append(stretch(made, QUIET))
        calm = [median(steps) for steps in quiet]
        noise = max(calm) / min(calm)
        # An attack that slows training slows it in each turn, compared with the quiet before and
        # after it; what else runs here does not.
        slower = min(
            median(steps) / max(around)
            for steps, around in zip(attacked, pairwise(calm), strict=True)
        )
        grown = memory[-1] - memory[0]
        print(f"a step takes {slower:.3f} of its time, noise {noise:.3f}, grown by {grown} kB")
        assert slower < max(noise, 1.1)
        assert grown < GROWTH
        assert {line["generation"] for line in made.lines(event="step")} == {0}
        assert node.stderr.count("Rejected a connection") < 10
        assert node.process.poll() is None, made.said()


def stretch(made: Job, seconds: float) -> list[float]:
    begin = time.monotonic()
    time.sleep(seconds)  # a length of time is what is measured here
    return steps_at(made, begin, begin + seconds)


def attack_job(made: Job, secret_file: Path, seed: int) -> list[float]:
    begin = time.monotonic()
    words = (made.port, f"job{made.port}", MANY, seed)
    with attack(*words, str(secret_file), rate=1000) as fuzzer:
        assert fuzzer.wait(300) == 0
    return steps_at(made, begin, time.monotonic())


def started(made: Job) -> Node:
    node = made.start(steps=1_000_000, slow=0.02)
    poll_for(lambda: len(made.lines(event="step", rank=0)) > 100, what="100 steps", timeout=120)
    return node
