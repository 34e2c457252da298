"""A network in memory, between machines in virtual time: latency, cuts, resets, killed processes.

To an application it behaves like TCP: bytes arrive in order or not at all; dropped packets are sent
again until the path is clear, or until the kernel gives up the connection; the connections of a
killed process are closed, those of a frozen one are not.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.virtual_loop import Scheduler, VirtualLoop
from torchelastic.transport.addresses import NETWORK
from torchelastic.transport.link import PEER_TIMEOUT

#: Seconds before the first resend of a SYN and of data, doubled each time, and the maximum.
SYN_RETRY, RESEND, LONGEST_RESEND = 1.0, 0.2, 3.0
#: The first ephemeral port.
EPHEMERAL = 40000


class VirtualNetwork:
    """All machines, and the paths between them."""

    def __init__(self, scheduler: Scheduler, latency: float = 0.0005) -> None:
        self.scheduler = scheduler
        self._latency = latency
        self._slow: dict[tuple[str, str], float] = {}
        #: Paths on which packets are lost, and paths on which they are answered with a reset.
        self._dropped: set[tuple[str, str]] = set()
        self._rejected: set[tuple[str, str]] = set()
        self.machines: dict[str, VirtualMachine] = {}
        self._connections: dict[Connection, None] = {}

    def latency(self, source: str, target: str) -> float:
        if source == target:
            return 0.00005
        return self._slow.get((source, target), self._latency)

    def slow(self, source: str, target: str, seconds: float | None) -> None:
        """Set the latency of packets; None: the default."""
        if seconds is None:
            self._slow.pop((source, target), None)
        else:
            self._slow[source, target] = seconds

    def cut(self, source: str, target: str, *, reset: bool = False) -> None:
        """Block one machine's packets to another: drop them, or answer with a reset."""
        (self._rejected if reset else self._dropped).add((source, target))
        for connection in self._between(source, target):
            connection.look()

    def mend(self, source: str, target: str) -> bool:
        """Let everything pass at the usual speed; return whether anything was blocked before."""
        self.slow(source, target, None)
        was_cut = self.is_cut(source, target)
        if was_cut:
            self._dropped.discard((source, target))
            self._rejected.discard((source, target))
            for connection in self._between(source, target):
                connection.look()
        return was_cut

    def drops(self, source: str, target: str) -> bool:
        return (source, target) in self._dropped

    def rejects(self, source: str, target: str) -> bool:
        return (source, target) in self._rejected

    def is_cut(self, source: str, target: str) -> bool:
        return self.drops(source, target) or self.rejects(source, target)

    def is_open(self, source: str, target: str) -> bool:
        """Return whether packets get there, and answers back."""
        return not (self.is_cut(source, target) or self.is_cut(target, source))

    def _between(self, source: str, target: str) -> list[Connection]:
        both = {source, target}
        return [one for one in self._connections if one.addresses == both]

    def add(self, connection: Connection) -> None:
        self._connections[connection] = None

    def remove(self, connection: Connection) -> None:
        self._connections.pop(connection, None)


class VirtualMachine:
    """A host with one address. The processes on it come and go; each has a `ProcessLoop`."""

    def __init__(self, network: VirtualNetwork, address: str) -> None:
        self.network = network
        self.address = address
        network.machines[address] = self
        self.listeners: dict[int, VirtualListener] = {}
        self._ports = EPHEMERAL

    def free_port(self) -> int:
        self._ports += 1
        return self._ports

    # The kernel calls of `addresses.Network`

    def resolve(self, host: str) -> list[tuple[int, str]]:
        if host not in self.network.machines:
            raise socket.gaierror(socket.EAI_NONAME, "no such name here")
        return [(socket.AF_INET, host)]

    def is_local(self, family: int, address: str) -> bool:
        return address == self.address

    def outward_address(self) -> str | None:
        return self.address

    def listen(self, family: int, address: str, port: int) -> Any:
        if family == socket.AF_INET6 and address != "::":
            raise OSError(errno.EADDRNOTAVAIL, "no IPv6 here")
        if port in self.listeners:
            raise OSError(errno.EADDRINUSE, "the port is in use")
        return VirtualListener(self, port or self.free_port())


class VirtualListener:
    """A listening socket, with the methods that the product uses."""

    def __init__(self, machine: VirtualMachine, port: int) -> None:
        self.machine = machine
        self.port = port
        self.loop: VirtualLoop | None = None
        self.accept: Callable[[], asyncio.BaseProtocol] | None = None
        machine.listeners[port] = self

    def getsockname(self) -> tuple[str, int]:
        return self.machine.address, self.port

    def listen(self, backlog: int) -> None:
        """Do nothing: it already listens."""

    def close(self) -> None:
        if self.machine.listeners.get(self.port) is self:
            del self.machine.listeners[self.port]

    def is_serving(self) -> bool:
        return self.machine.listeners.get(self.port) is self


class ProcessLoop(VirtualLoop):
    """The event loop of a process on a machine."""

    def __init__(self, scheduler: Scheduler, machine: VirtualMachine) -> None:
        super().__init__(scheduler)
        self.machine = machine
        self.context.run(NETWORK.set, machine)
        self.ends: dict[ConnectionEnd, None] = {}

    async def create_server(self, protocol_factory: Any, *, sock: Any, **_: Any) -> Any:  # type: ignore[override]
        sock.loop, sock.accept = self, protocol_factory
        return sock

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Any, host: str, port: int, **_: Any
    ) -> tuple[Any, Any]:
        machine = self.machine
        network, source = machine.network, machine.address
        target = source if host in ("127.0.0.1", "::1") else host
        wait = SYN_RETRY
        while True:
            await asyncio.sleep(network.latency(source, target))
            if network.rejects(source, target):
                raise _refused(host, port)
            if not network.drops(source, target):
                listener = self._listener(target, port)
                if not network.is_open(target, source):
                    pass  # the answer is lost
                elif listener is None:
                    await asyncio.sleep(network.latency(target, source))
                    raise _refused(host, port)
                else:
                    break
            await asyncio.sleep(wait)
            wait *= 2
        connection = Connection(network, self, listener)
        protocol = protocol_factory()
        connection.ends[0].begin(protocol)
        connection.ends[1].accept(listener)
        await asyncio.sleep(network.latency(target, source))
        return connection.ends[0], protocol

    def _listener(self, address: str, port: int) -> VirtualListener | None:
        machine = self.machine.network.machines.get(address)
        listener = machine.listeners.get(port) if machine is not None else None
        return listener if listener is not None and listener.accept is not None else None

    def kill(self) -> None:
        """End the process like SIGKILL: the kernel closes what it had open."""
        self.end()
        for listener in list(self.machine.listeners.values()):
            if listener.loop is self or listener.loop is None:
                listener.close()
        for end in list(self.ends):
            end.close_by_kernel()


def _refused(host: str, port: int) -> ConnectionRefusedError:
    return ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {(host, port)}")


class Connection:
    """Two ends."""

    def __init__(
        self, network: VirtualNetwork, caller: ProcessLoop, listener: VirtualListener
    ) -> None:
        assert isinstance(listener.loop, ProcessLoop)
        called = listener.loop
        self.network = network
        self.addresses = {caller.machine.address, called.machine.address}
        near = (caller.machine.address, caller.machine.free_port())
        far = (called.machine.address, listener.port)
        self.ends = (ConnectionEnd(self, caller, near, far), ConnectionEnd(self, called, far, near))
        self.ends[0].peer, self.ends[1].peer = self.ends[1], self.ends[0]
        self._given_up: asyncio.TimerHandle | None = None
        network.add(self)

    def look(self) -> None:
        """Check the path after a change."""
        one, other = (end.address[0] for end in self.ends)
        if self.network.is_open(one, other):
            if self._given_up is not None:
                self._given_up.cancel()
                self._given_up = None
            for end in self.ends:
                end.resend()
        elif self._given_up is None:
            now = self.network.scheduler.now
            self._given_up = self.network.scheduler.at(now + PEER_TIMEOUT, self._give_up)

    def _give_up(self) -> None:
        """End the connection after no probe was answered for too long, at either end."""
        for end in self.ends:
            end.fail(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))

    def closed(self) -> None:
        if all(end.is_over for end in self.ends):
            if self._given_up is not None:
                self._given_up.cancel()
            self.network.remove(self)


#: Markers for the end of the data: in order, and immediate.
_EOF, _RESET = b"", None


class ConnectionEnd(asyncio.Transport):
    """One end of a connection, which its process writes to and reads from."""

    def __init__(
        self,
        connection: Connection,
        loop: ProcessLoop,
        address: tuple[str, int],
        peer_address: tuple[str, int],
    ) -> None:
        self.connection = connection
        self.loop = loop
        self.address = address
        self.peer_address = peer_address
        self.peer: ConnectionEnd
        self.protocol: asyncio.BaseProtocol | None = None
        #: Data in flight, each with the time it was sent.
        self._sent: deque[tuple[float, bytes | None]] = deque()
        self._arrives_at = 0.0
        #: Data that arrived and has not been read.
        self._received: deque[bytes] = deque()
        self._paused = False
        self._reading = False
        self._closing = False
        self.is_over = False
        loop.ends[self] = None

    # Life

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol
        self.loop.call_soon(protocol.connection_made, self, context=self.loop.context)

    def accept(self, listener: VirtualListener) -> None:
        """Accept the connection when the called process runs."""

        def accepted() -> None:
            if listener.accept is None or self.is_over:
                return
            self.protocol = listener.accept()
            self.protocol.connection_made(self)
            self._read_soon()

        self.loop.call_soon(accepted, context=self.loop.context)

    def close_by_kernel(self) -> None:
        """Close it after its process has died."""
        self._send(_RESET if self._received else _EOF)
        self._end()

    def fail(self, error: Exception | None) -> None:
        """End it with an error of the kernel."""
        if self.is_over:
            return
        self._end()
        if self.protocol is not None:
            self.loop.call_soon(self.protocol.connection_lost, error, context=self.loop.context)

    def _end(self) -> None:
        self.is_over = self._closing = True
        self._received.clear()
        self.loop.ends.pop(self, None)
        self.connection.closed()

    # Called by protocols

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self, "peername": self.peer_address}.get(name, default)

    def setsockopt(self, *_: Any) -> None:
        """Nothing."""

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: what is sent is on its way."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._closing:
            self._send(bytes(data))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._closing:
            self._send(_EOF)
            self.fail(None)

    def abort(self) -> None:
        if not self.is_over:
            self._send(_RESET)
            self.fail(None)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._read_soon()

    # On the way

    def _send(self, data: bytes | None) -> None:
        scheduler, network = self.connection.network.scheduler, self.connection.network
        source, target = self.address[0], self.peer_address[0]
        if network.rejects(source, target):
            self._sent.clear()
            if data:
                scheduler.at(scheduler.now + network.latency(source, target), self._was_rejected)
            return
        self._sent.append((scheduler.now, data))
        if len(self._sent) == 1 or self._arrives_at <= scheduler.now:
            arrival = scheduler.now + network.latency(source, target)
            self._arrives_at = max(arrival, self._arrives_at)
            scheduler.at(self._arrives_at, self._arrive)

    def _was_rejected(self) -> None:
        self.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def resend(self) -> None:
        """Send lost data again: the path is clear."""
        if not self._sent:
            return
        now = self.connection.network.scheduler.now
        first, wait = self._sent[0][0], RESEND
        while first <= now:
            first += wait
            wait = min(2 * wait, LONGEST_RESEND)
        self.connection.network.scheduler.at(first, self._arrive)

    def _arrive(self) -> None:
        """Deliver everything that was sent by now, if the path is clear."""
        network, source, target = self.connection.network, self.address[0], self.peer_address[0]
        if network.drops(source, target) or network.rejects(source, target):
            return
        sent, self._sent = self._sent, deque()
        now, latency = network.scheduler.now, network.latency(source, target)
        for at, data in sent:
            if at + latency > now + 1e-9 and data is not _RESET:
                self._sent.append((at, data))
            else:
                self.peer.arrived(data)
        if self._sent:
            self._arrives_at = max(self._sent[0][0] + latency, now)
            network.scheduler.at(self._arrives_at, self._arrive)

    def arrived(self, data: bytes | None) -> None:
        if self.is_over:
            if data and not self.peer.is_over:  # the process is gone
                self._send(_RESET)
        elif data is _RESET:
            self.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        else:
            self._received.append(data)
            self._read_soon()

    def _read_soon(self) -> None:
        if self._received and not self._reading and not self._paused and self.protocol is not None:
            self._reading = True
            self.loop.call_soon(self._read, context=self.loop.context)

    def _read(self) -> None:
        self._reading = False
        protocol = self.protocol
        assert isinstance(protocol, asyncio.BufferedProtocol)
        while self._received and not self._paused and not self.is_over:
            data = self._received.popleft()
            if data == _EOF:
                self._end()
                protocol.connection_lost(None)
                return
            while self._received and self._received[0]:
                data += self._received.popleft()
            room: Any = protocol.get_buffer(-1)
            while data and not self.is_over:
                portion, data = data[: len(room)], data[len(room) :]
                room[: len(portion)] = portion
                protocol.buffer_updated(len(portion))
