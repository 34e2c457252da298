"""A process that is its own node: a thread does for one worker what an agent does for its workers.

A plain `python main.py` has no launcher. This thread joins the job, leads when it is its turn, and
talks to the training side over a socket as an agent would. It starts no process: when the worker
dies, its node is gone too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from datetime import timedelta

from torchelastic import env
from torchelastic.agent.failure_report import beginning
from torchelastic.agent.lifecycle import in_process
from torchelastic.agent.lifecycle.in_process import InProcessState, Status
from torchelastic.agent.lifecycle.node_state import (
    LeaseLost,
    Named,
    StoreLost,
    WorkerFailed,
    WorkerLeft,
    WorkerMessage,
    WorkerProgress,
    WorkersGone,
    WorldSeen,
)
from torchelastic.agent.node_loop import NodeLoop
from torchelastic.agent.watch.hang_watchdog import LOOK, WorkerPace, limit_for
from torchelastic.config import LaunchConfig
from torchelastic.errors import TorchElasticError
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.backend_parameters import RendezvousUrl, parse_url
from torchelastic.rendezvous.membership.node_driver import NodeDriver
from torchelastic.rendezvous.world import World
from torchelastic.transport.addresses import interface_of
from torchelastic.worker import channel, orders, status_page
from torchelastic.worker.worker_stores import OwnStores

logger = logging.getLogger("torchelastic")

#: Seconds that the worker's control thread has to answer.
ANSWER = 1.0


def start(
    url: str, *, max_workers: int | None = None, timeout: timedelta = timedelta(minutes=30)
) -> socket.socket:
    """Join the job at `url` in a thread; return the worker's end of its channel.

    `timeout` limits how long others wait for this worker: in a collective, and when a world ends.
    The process waits for the thread before it exits: the host of the rendezvous stays until the
    others know that the training is done.
    """
    config = config_for(parse_url(url), max_workers)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = StandaloneNode(config, ours, patience=timeout.total_seconds())
    threading.Thread(target=node.run, name="torchelastic-node").start()
    return theirs


def config_for(url: RendezvousUrl, max_workers: int | None) -> LaunchConfig:
    """Return the configuration of a job in which every worker is a node."""
    defaults = LaunchConfig()
    return LaunchConfig(
        min_nodes=url.min_workers,
        max_nodes=max(url.max_workers, max_workers or 0),
        run_id=url.run_id,
        rdzv_backend=url.backend,
        rdzv_endpoint=url.endpoint,
        rdzv_configs=url.options,
        rdzv_secret_file=url.files.get("secret_file"),
        rdzv_tls_cert=url.files.get("tls_cert"),
        rdzv_tls_key=url.files.get("tls_key"),
        rdzv_tls_ca=url.files.get("tls_ca"),
        wait_for_nodes=defaults.wait_for_nodes if url.timeout is None else url.timeout,
        settle=defaults.settle if url.last_call_timeout is None else url.last_call_timeout,
        quorum=url.quorum,
        witness=url.witness,
        progress_timeout=url.progress_timeout,
    )


class StandaloneNode(NodeLoop):
    """One node with one worker: this process. It can be told things, but not started or killed."""

    def __init__(
        self, config: LaunchConfig, channel_end: socket.socket, *, patience: float = 1800.0
    ) -> None:
        """`patience`: seconds that the worker may take to stop when its world is over."""
        self._config = config
        self._patience = min(patience, config.progress_timeout or patience)
        self._channel = channel_end
        self._driver = NodeDriver(
            config,
            OwnStores(),
            on_world=lambda world: self.queue.put_nowait(WorldSeen(world)),
            on_lease_lost=lambda: self.queue.put_nowait(LeaseLost()),
            on_error=lambda error: self.queue.put_nowait(error),
            on_joined=self._joined,
            on_lease=lambda until: status_page.write_lease(self._status_page, until),
        )
        super().__init__(in_process.alone(self._driver.node, socket.gethostname()))
        self.session, self.tasks = self._driver.session, self._driver.tasks
        #: The last step that the worker has reported.
        self._step = -1
        #: Its status page, and the progress read from it.
        self._status_page = -1
        self._trained = -1
        self._pace = WorkerPace()
        #: When we told it to enter its world, and when that the world is over.
        self._entering_at = self._over_at = 0.0
        #: The last answer of its control thread.
        self._pong = orders.Pong(waiting=False, number=0)

    def run(self) -> None:
        """Run the node, as the thread's function."""
        try:
            self._driver.run(self._run, self._failed)
        finally:
            self._channel.close()

    def _failed(self, error: TorchElasticError) -> None:
        logger.error("%s", error)
        self._send(orders.Closed(str(error)))

    async def _run(self) -> None:
        self._channel.setblocking(False)
        self._status_page = status_page.create()
        try:
            async with self._driver.membership(in_process=True, starting=1, ready=True):
                self.tasks.start(self._listen, "listen")
                self.tasks.start(self._watch, "hang-watchdog")
                await self.supervise()
        finally:
            os.close(self._status_page)

    def _joined(self) -> None:
        """Make gloo listen where other nodes reach this one, not at the host name's address."""
        interface = interface_of(self.session.backend.addr)
        if interface is not None and not env.get("GLOO_SOCKET_IFNAME"):
            env.update({"GLOO_SOCKET_IFNAME": interface})
        self.queue.put_nowait(Named(self.session.member.name))

    # --- the worker ------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Read the worker's reports until it closes its end, having left `train`."""
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self._channel, channel.LIMIT):
            self._heard(orders.from_json(json.loads(data)))
        self.queue.put_nowait(WorkerLeft(0))

    def _heard(self, report: orders.Order | orders.Report | None) -> None:
        match report:
            case orders.Erred() | orders.PeerLost():
                self._step = report.step
                self.queue.put_nowait(WorkerFailed(self._failure(report)))
            case orders.Enlisted():
                self._send(orders.StatusPage(self._config.lease), os.dup(self._status_page))
                self.queue.put_nowait(WorkerMessage(0, report))
            case orders.Stopped() | orders.Finished() | orders.Up():
                self._step = report.step
                self.queue.put_nowait(WorkerMessage(0, report))
            case orders.Entered() | orders.Checked() | orders.Unfit():
                self.queue.put_nowait(WorkerMessage(0, report))
            case orders.Pong():
                self._pong = report
            case orders.Begins():
                best = self.state.world.restarts.best_step if self.state.world is not None else -1
                if said := beginning(report, best_step=best, in_process=True):
                    logger.warning(said)

    def _failure(self, erred: orders.Erred | orders.PeerLost) -> Failure:
        world = self.state.world
        rank = world.rank(self._driver.node, 0) if world is not None else None
        lost = isinstance(erred, orders.PeerLost)
        return Failure(
            generation=self.state.generation,
            node=self.state.name,
            rank=-1 if rank is None else rank,
            local_rank=0,
            pid=0,
            exitcode=1,
            message=f"lost a peer: {erred.message}" if lost else erred.message,
            traceback="" if isinstance(erred, orders.PeerLost) else erred.traceback,
            place="" if isinstance(erred, orders.PeerLost) else erred.place,
            step=erred.step,
            alive=True,
            fatal=isinstance(erred, orders.Erred) and not erred.retry,
        )

    def seen(self) -> WorkerProgress:
        self._trained = max(self._trained, status_page.read_trained(self._status_page))
        holds, _, _ = status_page.read_progress(self._status_page)
        return WorkerProgress(self._step, self._trained, holds)

    def start(self, world: World) -> None:
        """Nothing: this process runs already."""

    def start_standby(self, local_rank: int) -> None:
        """Nothing: no other process can take its place."""

    def tell(self, local_rank: int, order: orders.Order) -> None:
        if isinstance(order, orders.Enter):
            self._entering_at = time.monotonic()
        elif isinstance(order, orders.Over):
            self._over_at = time.monotonic()
        self._send(order)

    def stop(self, signum: int, told: frozenset[int]) -> None:
        """Tell the worker that the job is closed or out of reach; it cannot be stopped."""
        if self.state.exitcode:
            self._send(orders.Closed(f"The job has ended: {self.state.reason}"))
        self.queue.put_nowait(WorkersGone())

    def kill(self, local_rank: int, why: str) -> None:
        """Leave the job: this process cannot be replaced."""
        logger.error("This worker leaves the job: %s", why)
        self.queue.put_nowait(StoreLost(why))

    async def _watch(self) -> None:
        """Leave the job when the worker is hung: the others must not wait forever.

        It cannot be killed and replaced like an agent's worker: that would end this process.
        """
        while True:
            await asyncio.sleep(min(LOOK, self._patience / 4))
            if why := await self._hang():
                logger.error(
                    "This worker is hung (%s). The other workers continue without it.", why
                )
                self.queue.put_nowait(StoreLost(f"this worker was hung ({why})"))
                return

    async def _hang(self) -> str:
        """Return why the worker is hung, or an empty string."""
        assert isinstance(self.state, InProcessState), "it is one from the beginning"
        worker, now = self.state.workers[0], time.monotonic()
        if worker.status is not Status.TRAINING:
            return ""
        if worker.stopping >= 0 and not worker.through:
            late = now - self._over_at > self._patience
            return f"not free {now - self._over_at:.1f} s after its world ended" if late else ""
        generation, step, at = status_page.read_progress(self._status_page)
        if generation == worker.generation:
            self._pace.saw(generation, step, at, status_page.read_first_step(self._status_page))
        else:
            self._pace.set_out(worker.generation, self._entering_at)
        limit = limit_for(self._pace, self._config.progress_timeout)
        if limit is None or now <= self._pace.entered_at + limit or await self._waits_for_others():
            return ""
        return self._pace.words(now)

    async def _waits_for_others(self) -> bool:
        """Return whether the training thread is in a collective; False if it does not answer."""
        number = self._pong.number + 1
        self._send(orders.Ping(number))
        deadline = time.monotonic() + ANSWER
        while self._pong.number < number and time.monotonic() < deadline:
            await asyncio.sleep(ANSWER / 100)
        return self._pong.number >= number and self._pong.waiting

    def _send(self, order: orders.Order, *descriptors: int) -> None:
        """Send an order and descriptors, which are closed here."""
        data = json.dumps(orders.to_json(order)).encode()
        try:
            channel.transmit(self._channel, data, descriptors)
        except OSError as error:
            logger.debug("the worker no longer reads its orders: %s", error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
