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
from dataclasses import replace
from datetime import timedelta
from functools import partial

from torchelastic import env
from torchelastic.agent.failure_report import beginning
from torchelastic.agent.lifecycle import in_process, script
from torchelastic.agent.lifecycle.in_process_state import Status
from torchelastic.agent.lifecycle.transitions import Transitions
from torchelastic.agent.watch.hang_watchdog import LOOK, WorkerPace, limit_for
from torchelastic.config import LaunchConfig
from torchelastic.errors import TorchElasticError
from torchelastic.events.failure import Failure
from torchelastic.rendezvous import url as urls
from torchelastic.rendezvous.membership.node_driver import NodeDriver
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
    config = config_for(urls.parse(url), max_workers)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = StandaloneNode(config, ours, patience=timeout.total_seconds())
    threading.Thread(target=node.run, name="torchelastic-node").start()
    return theirs


def config_for(url: urls.RendezvousUrl, max_workers: int | None) -> LaunchConfig:
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


class _HasLeft:
    """The worker has closed its end of the channel."""


class StandaloneNode:
    """One node with one worker: this process."""

    def __init__(
        self, config: LaunchConfig, channel_end: socket.socket, *, patience: float = 1800.0
    ) -> None:
        """`patience`: seconds that the worker may take to stop when its world is over."""
        self._config = config
        self._patience = min(patience, config.progress_timeout or patience)
        self._channel = channel_end
        self._queue: asyncio.Queue[in_process.Event | _HasLeft | Exception] = asyncio.Queue()
        self._driver = NodeDriver(
            config,
            OwnStores(),
            on_world=lambda world: self._queue.put_nowait(script.WorldSeen(world)),
            on_lease_lost=lambda: self._queue.put_nowait(script.LeaseLost()),
            on_error=self._queue.put_nowait,
            on_joined=self._joined,
            on_lease=lambda until: status_page.write_lease(self._status_page, until),
        )
        self._session = self._driver.session
        self._state = in_process.alone(self._driver.node, socket.gethostname())
        self._transitions = Transitions()
        self._step = -1
        #: The worker's status page, and the progress read from it.
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
        self._tell(orders.Closed(str(error)))

    async def _run(self) -> None:
        self._channel.setblocking(False)
        self._status_page = status_page.create()
        try:
            async with self._driver.membership(in_process=True, starting=1, ready=True):
                self._driver.tasks.start(self._listen, "listen")
                self._driver.tasks.start(self._watch, "hang-watchdog")
                while not self._state.is_terminal:
                    event = await self._next_event()
                    self._state, commands = self._transitions.take(
                        in_process.handle, self._state, event
                    )
                    for command in commands:
                        self._perform(command)
        finally:
            os.close(self._status_page)

    async def _next_event(self) -> in_process.Event:
        event = await self._queue.get()
        if isinstance(event, Exception):
            raise event
        return self._parting() if isinstance(event, _HasLeft) else event

    def _parting(self) -> in_process.Event:
        """Return the event for a worker that left `train`, after all its reports were read."""
        if self._state.having(Status.FINISHED):
            return script.WorkerSucceeded(self._state.generation, 0)
        return script.StoreLost("the worker has left the training")

    def _joined(self) -> None:
        """Make gloo listen where other nodes reach this one, not at the host name's address."""
        interface = interface_of(self._session.backend.addr)
        if interface is not None and not env.get("GLOO_SOCKET_IFNAME"):
            env.update({"GLOO_SOCKET_IFNAME": interface})
        self._state = replace(self._state, name=self._session.member.name)

    # --- the worker ------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Read the worker's reports until it closes its end, having left `train`."""
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self._channel, channel.LIMIT):
            self._heard(orders.from_json(json.loads(data)))
        # Earlier reports may still be queued: process them before deciding what this end means.
        self._queue.put_nowait(_HasLeft())

    def _heard(self, report: orders.Order | orders.Report | None) -> None:
        match report:
            case orders.Erred() | orders.PeerLost():
                self._step = report.step
                self._queue.put_nowait(script.WorkerFailed(self._failure(report)))
            case orders.Enlisted():
                self._tell(orders.StatusPage(self._config.lease), os.dup(self._status_page))
                self._queue.put_nowait(in_process.WorkerMessage(0, report))
            case orders.Stopped() | orders.Finished() | orders.Up():
                self._step = report.step
                self._queue.put_nowait(in_process.WorkerMessage(0, report))
            case orders.Entered() | orders.Unfit():
                self._queue.put_nowait(in_process.WorkerMessage(0, report))
            case orders.Pong():
                self._pong = report
            case orders.Begins():
                best = self._state.world.restarts.best_step if self._state.world is not None else -1
                if said := beginning(report, best_step=best, in_process=True):
                    logger.warning(said)

    def _failure(self, erred: orders.Erred | orders.PeerLost) -> Failure:
        world = self._state.world
        rank = world.rank(self._driver.node, 0) if world is not None else None
        lost = isinstance(erred, orders.PeerLost)
        return Failure(
            generation=self._state.generation,
            node=self._state.name,
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

    def _perform(self, command: in_process.Command) -> None:
        match command:
            case script.Tell(_, order):
                if isinstance(order, orders.Enter):
                    self._entering_at = time.monotonic()
                elif isinstance(order, orders.Over):
                    self._over_at = time.monotonic()
                self._tell(order)
            case script.ReportMember(changes):
                self._trained = max(self._trained, status_page.read_trained(self._status_page))
                steps = {"step": self._step, "trained": self._trained}
                holds, _, _ = status_page.read_progress(self._status_page)
                self._session.update(**{**steps, "holds": holds, **changes})
            case script.Rejoin(gone):
                self._driver.tasks.start(partial(self._session.rejoin, gone), "rejoin")
            case script.Stop():
                self._end()

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
                self._queue.put_nowait(script.StoreLost(f"this worker was hung ({why})"))
                return

    async def _hang(self) -> str:
        """Return why the worker is hung, or an empty string."""
        worker, now = self._state.workers[0], time.monotonic()
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
        self._tell(orders.Ping(number))
        deadline = time.monotonic() + ANSWER
        while self._pong.number < number and time.monotonic() < deadline:
            await asyncio.sleep(ANSWER / 100)
        return self._pong.number >= number and self._pong.waiting

    def _end(self) -> None:
        """Tell the worker that the job is closed or out of reach; it cannot be stopped."""
        if self._state.exitcode:
            self._tell(orders.Closed(f"The job has ended: {self._state.reason}"))
        self._queue.put_nowait(script.WorkersGone())

    def _tell(self, order: orders.Order, *descriptors: int) -> None:
        """Send an order and descriptors, which are closed here."""
        data = json.dumps(orders.to_json(order)).encode()
        try:
            channel.transmit(self._channel, data, descriptors)
        except OSError as error:
            logger.debug("the worker no longer reads its orders: %s", error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
