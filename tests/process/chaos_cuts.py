"""Random cuts between the hosts of a job: `python -m tests.process.chaos_cuts --seed 7`.

Five nodes train, each on a host of its own; an etcd is on a sixth, which is never cut off. Halves,
minorities and pairs of hosts do not reach each other for some seconds, both ways or one, by dropped
packets or by resets, once or again and again. After each cut all nodes must train within 30 s; in
the end the laws must hold, and each sample must have been used once an epoch.

    --mode script|keep|train   what runs (default: by the seed)
    --store embedded|etcd      where the nodes meet (default: by the seed)
    --cuts 6                   how many

The same seed makes the same cuts. What happens between them depends on the machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.etcd import on_host
from tests.netns import Host, Network
from tests.process.chaos_driver import NO_GATE, Chaos
from tests.process.chaos_record import proven
from tests.process.network_jobs import (
    PORT,
    ROUNDS,
    NetworkJob,
    check_one_world_at_a_time,
    network_job,
)

NODES = 5
MODES, STORES = ("train", "keep", "script"), ("etcd", "embedded")
SAMPLES = 96
#: Seconds in which all nodes train after a cut, and before the first one.
ALL_TRAIN, FIRST = 30.0, 300.0
#: Seconds of a cut, at least and at most; and of a flap: cut, and healed.
SECONDS, FLAP = (1.0, 12.0), (0.4, 0.6)
#: Seconds between two cuts, in which all train.
PAUSE = 1.0
#: Seconds that a step takes at least, and steps until a gate that no worker has passed when it is
#: shut.
PACE, AHEAD = 0.1, 40
PRELOAD = "torchelastic.data,torchelastic.p2p,torchelastic.training.torch_state"
FLAGS = f"--nnodes=1:{NODES} --lease=2 --settle=0.5"


class Cut(NamedTuple):
    """Hosts that do not reach each other, by their numbers."""

    sides: tuple[tuple[int, ...], ...]
    how: Literal["drop", "reset"]
    one_way: bool
    #: How often; each time but the last it is healed at once.
    times: int
    seconds: float

    def __str__(self) -> str:
        between = " -> " if self.one_way else " | "
        who = between.join(" ".join(map(str, side)) for side in self.sides)
        again = f", {self.times} times" if self.times > 1 else ""
        return f"{who} ({self.how}, {self.seconds:g} s{again})"


def cuts(seed: int, count: int, hosts: int = NODES) -> list[Cut]:
    """The cuts of a seed. Pure."""
    chance = random.Random(f"cuts of {seed}")
    return [_cut(chance, hosts) for _ in range(count)]


def _cut(chance: random.Random, hosts: int) -> Cut:
    every = chance.sample(range(1, hosts + 1), hosts)
    sizes = chance.choice([(2, 3), (3, 2), (2, 3), (1, 4), (4, 1), (1, 1), (2, 2, 1)])
    sides = []
    for size in sizes:
        sides.append(tuple(sorted(every[:size])))
        every = every[size:]
    flaps = chance.random() < 0.3
    return Cut(
        tuple(sides),
        how="reset" if chance.random() < (0.8 if flaps else 0.3) else "drop",
        one_way=chance.random() < 0.25,
        times=chance.randint(3, 6) if flaps else 1,
        seconds=round(chance.uniform(*SECONDS), 1),
    )


class Training:
    """Five nodes that train, and the steps that all of them have made."""

    def __init__(self, job: NetworkJob, mode: str) -> None:
        self.job, self.mode = job, mode
        self.chaos: Chaos | None = None
        if mode == "script":
            job.start_all(job.hosts)
            return
        worker = "script" if mode == "keep" else mode
        self.chaos = Chaos(job, worker, {"pace": PACE, "samples": SAMPLES, "loaders": 0})
        self.chaos.open(NO_GATE)
        for _ in job.hosts:
            self.chaos.join(workers=1)

    def wait_for_all(self, since: float, limit: float, what: str) -> str:
        """Wait until one world of all nodes has made a step; which one, and how soon."""
        deadline = time.monotonic() + limit
        while True:
            if (found := self._all_stepped(since)) is not None:
                return f"generation {found[1]} of all trains {found[0] - since:.1f} s after it"
            if time.monotonic() > deadline:
                raise AssertionError(f"not all nodes train {limit:g} s after {what}")
            time.sleep(0.1)

    def _all_stepped(self, since: float) -> tuple[float, int] | None:
        """When all ranks of a world of all nodes had finished a step that is newer than this, and
        which world."""
        ranks: dict[tuple[int, int], dict[int, float]] = {}
        for line in self._steps():
            at = line.get("at", line.get("entered", 0.0))
            if at > since and line["size"] == NODES:
                ranks.setdefault((line["generation"], line["step"]), {})[line["rank"]] = at
        whole = [
            (max(found.values()), generation)
            for (generation, _), found in ranks.items()
            if len(found) == NODES
        ]
        return min(whole, default=None)

    def _steps(self) -> list[dict[str, Any]]:
        return self.job.steps() if self.chaos is None else self.chaos.record.of("done")

    def end(self) -> list[str]:
        """Let the training end, and say what is wrong with it."""
        if self.chaos is None:
            check_one_world_at_a_time(self.job)
            return []
        newest = max(line["step"] for line in self._steps())
        self.chaos.gate = 0
        self.chaos.open(newest + AHEAD)
        self.chaos.finish()
        worker = self.chaos.mode
        return proven([self.chaos.record], [self.chaos.ledger], samples=SAMPLES, mode=worker)


@contextmanager
def training(directory: Path, mode: str, store: str, listed: bool) -> Iterator[tuple[Network, Any]]:
    """`listed`: the nodes are given a list of endpoints, not one."""
    flags = FLAGS if mode == "script" else f"{FLAGS} --preload={PRELOAD}"
    with ExitStack() as stack:
        network = stack.enter_context(Network(NODES + 1, ipv6=False))
        *hosts, last = network.hosts
        endpoint = ",".join(f"{host.name}:{PORT}" for host in hosts[: 3 if listed else 1])
        if store == "etcd":
            flags += " --rdzv-backend=etcd"
            endpoint = stack.enter_context(on_host(last, directory / "etcd"))
        made = stack.enter_context(
            network_job(
                directory / "job",
                network,
                flags,
                endpoint=endpoint,
                script=ROUNDS,
                hosts=hosts,
                raises=1,
            )
        )
        yield network, Training(made, mode)


def carry_out(network: Network, cut: Cut) -> None:
    sides: list[list[Host]] = [[network.hosts[one - 1] for one in side] for side in cut.sides]
    for left in range(cut.times, 0, -1):
        network.cut(*sides, how=cut.how, one_way=cut.one_way)
        time.sleep(cut.seconds if left == 1 else FLAP[0])
        network.heal()
        if left > 1:
            time.sleep(FLAP[1])


def run(
    directory: Path,
    seed: int,
    *,
    count: int = 6,
    mode: str = "",
    store: str = "",
    say: Callable[[str], None] = print,
) -> None:
    """Make the cuts of a seed; raises an `AssertionError` that names them."""
    mode = mode or MODES[seed % len(MODES)]
    store = store or STORES[seed // len(MODES) % len(STORES)]
    listed = random.Random(seed).random() < 0.5
    story = [f"seed {seed}: {mode}, {store}{', a list of endpoints' if listed else ''}"]
    say(story[0])
    with training(directory, mode, store, listed) as (network, made):
        try:
            made.wait_for_all(time.monotonic() - FIRST, FIRST, "the start")
            for cut in cuts(seed, count):
                story.append(f"cut {cut}")
                carry_out(network, cut)
                told = made.wait_for_all(time.monotonic(), ALL_TRAIN, f"the cut {cut}")
                story[-1] += f": {told}"
                say(story[-1])
                time.sleep(PAUSE)
            wrong = made.end()
            assert not wrong, "\n".join(wrong)
        except AssertionError as error:
            said = made.job.said() if made.chaos is None else ""
            raise AssertionError("\n".join([*story, str(error), said])) from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.process.chaos_cuts")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds (default 1)")
    parser.add_argument("--cuts", type=int, default=6, help="cuts of each (default 6)")
    parser.add_argument("--mode", choices=MODES, default="", help="default: by the seed")
    parser.add_argument("--store", choices=STORES, default="", help="default: by the seed")
    parser.add_argument("--logs", type=Path, help="keep what failed jobs wrote here")
    options = parser.parse_args(argv)
    failed = []
    for seed in range(options.seed, options.seed + options.count):
        with ExitStack() as stack:
            if options.logs is not None:
                directory = options.logs / f"seed{seed}"
                directory.mkdir(parents=True)
            else:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                run(directory, seed, count=options.cuts, mode=options.mode, store=options.store)
            except AssertionError as error:
                failed.append(seed)
                print(error, flush=True)
    print(f"{options.count - len(failed)} of {options.count} seeds in order; failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
