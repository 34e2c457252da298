"""Jobs whose nodes are hosts of a network, and what must hold of them whatever happens to it."""

from __future__ import annotations

import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.netns import Host, Network
from tests.process.jobs import HERE, Job, Node
from torchelastic.config import format_endpoint

ROUNDS = HERE / "rounds.py"
PORT = 29400


class HostNode(Node):
    """One `torchelastic run` on a host."""

    def __init__(
        self, host: Host, command: list[str], directory: Path, env: dict[str, str]
    ) -> None:
        super().__init__(host.command(command), directory, env)
        self.host = host


class NetworkJob(Job):
    """Nodes on hosts; all are given the same endpoint."""

    def __init__(
        self,
        directory: Path,
        flags: str,
        script: Path,
        endpoint: str,
        hosts: Sequence[Host],
        **keys: Any,
    ) -> None:
        super().__init__(directory, flags, script, PORT, **keys)
        self.endpoint = endpoint
        self.hosts = list(hosts)

    def start(self, flags: str = "", *, script: list[str] | None = None, **keys: Any) -> HostNode:
        """Start the next node, on the next host."""
        return self.start_on(self.hosts[len(self.nodes)], flags, script=script)

    def start_on(
        self,
        host: Host,
        flags: str = "",
        *,
        endpoint: str | None = None,
        run_id: str = "net",
        script: list[str] | None = None,
    ) -> HostNode:
        directory = self.directory / f"{host.name}-{len(self.nodes)}"
        command = [sys.executable, "-m", "torchelastic", "run", f"--log-dir={directory}/logs"]
        command += [f"--rdzv-endpoint={endpoint or self.endpoint}", f"--rdzv-id={run_id}"]
        command += [*self.flags, *flags.split(), *(script or self.command())]
        node = HostNode(host, command, directory, dict(os.environ) if script else self.environ)
        self.nodes.append(node)
        return node

    def start_all(self, hosts: Sequence[Host]) -> list[HostNode]:
        return [self.start_on(host) for host in hosts]


@contextmanager
def network_job(
    directory: Path,
    network: Network,
    flags: str = "",
    *,
    endpoint: str | None = None,
    script: Path = ROUNDS,
    hosts: Sequence[Host] = (),
    **keys: Any,
) -> Iterator[NetworkJob]:
    """A job on a network; the first host's name is where it meets, unless told otherwise. `hosts`
    are those of its nodes."""
    endpoint = endpoint or format_endpoint(network.hosts[0].name, PORT)
    made = NetworkJob(directory, flags, script, endpoint, hosts or network.hosts, **keys)
    try:
        yield made
    finally:
        network.heal()
        for host in network.hosts:
            host.wake()
        made.close()


def check_one_world_at_a_time(made: NetworkJob) -> None:
    """Laws 1 and 2, from what the workers wrote: no step is made that was entered after one of a
    later generation, and every step is made with the same result by all who make it.

    All hosts are on one machine, so their monotonic clocks are one. A worker that was frozen may
    end the step it was in when it wakes; that is no progress.
    """
    steps = sorted(made.steps(), key=lambda line: line["entered"])
    generations = [line["generation"] for line in steps]
    assert generations == sorted(generations), _interleaved(steps)
    sizes: dict[int, set[int]] = defaultdict(set)
    for line in steps:
        sizes[line["generation"]].add(line["size"])
    assert all(len(found) == 1 for found in sizes.values()), f"two worlds of one number: {sizes}"
    results: dict[tuple[int, int], set[str]] = defaultdict(set)
    for line in steps:
        results[line["generation"], line["step"]].add(line.get("hash", ""))
    assert all(len(found) == 1 for found in results.values()), "workers of a world differ"
    for node in made.nodes:
        formed = [record["generation"] for record in node.events("world-formed")]
        assert formed == sorted(set(formed)), f"{node.directory.name} saw generations {formed}"


def _interleaved(steps: list[dict[str, Any]]) -> str:
    """Where two worlds were at work at the same time."""
    for before, after in itertools.pairwise(steps):
        if after["generation"] < before["generation"]:
            return f"two worlds at once: {before} and then {after}"
    return ""
