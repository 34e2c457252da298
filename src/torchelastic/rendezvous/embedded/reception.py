"""An agent's one port: whoever comes is greeted here, and handed on if the job is theirs.

A connection is a guest until its first frame was looked at: who it is, which version it speaks,
which job it means. Then it belongs to the handler of the purpose its hello names. Everything is
done in the callback that brought the frame.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial

from torchelastic.rendezvous.embedded import wire
from torchelastic.rendezvous.embedded.endpoint import LISTEN_BACKLOG
from torchelastic.rendezvous.embedded.link import Link

log = logging.getLogger(__name__)

#: Seconds a new connection has to say hello, and a closing one to take its last words.
PATIENCE = 10.0
CLOSING_PATIENCE = 1.0

#: Answers the hello with `Welcome`, `Refusal` or `Elsewhere`, and owns the link from then on.
Handler = Callable[[Link, wire.Hello], None]


class _Guest:
    """A connection that is not admitted yet."""

    def __init__(self, link: Link, hello_due: asyncio.TimerHandle) -> None:
        self.link = link
        self.hello_due = hello_due

    def refuse(self, sentence: str) -> None:
        """Say why, and end the connection."""
        self.link.send(wire.Refusal(sentence))
        self.link.close()


class Reception:
    """Listens for the connections of one job and hands them to who serves their purpose."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._handlers: dict[str, Handler] = {}
        self._listeners: list[asyncio.Server] = []
        self._guests: set[_Guest] = set()
        self.port = 0

    def serve(self, purpose: str, handler: Handler) -> None:
        """Hand the connections of this purpose to `handler` from now on."""
        self._handlers[purpose] = handler

    async def listen(self, sockets: Sequence[socket.socket]) -> int:
        """Receive on the sockets `bind_endpoint` gave; returns the port."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            # Written out, for the default backlog makes the 101st joiner wait for a second.
            listener = await loop.create_server(self._accept, sock=sock, backlog=LISTEN_BACKLOG)
            self._listeners.append(listener)
        self.port = int(sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Receive nobody any more. What was handed on stays with its handler."""
        for listener in self._listeners:
            listener.close()
        ends = [guest.link.ended for guest in self._guests]
        for guest in self._guests:
            guest.refuse("This agent has ended.")
        if ends:
            await asyncio.wait(ends, timeout=CLOSING_PATIENCE)
        for guest in self._guests:
            guest.link.abort()
        if ends:
            await asyncio.wait(ends)

    def _accept(self) -> Link:
        link = Link()
        hello_due = asyncio.get_running_loop().call_later(PATIENCE, link.abort)
        guest = _Guest(link, hello_due)
        self._guests.add(guest)
        link.ended.add_done_callback(lambda _: self._forget(guest))
        link.deliver_to(partial(self._greet, guest))
        return link

    def _forget(self, guest: _Guest) -> None:
        guest.hello_due.cancel()
        self._guests.discard(guest)

    def _greet(self, guest: _Guest, payload: bytes) -> None:
        """The first frame. What raises here is no client of ours: its connection just ends."""
        hello = wire.parse_hello(payload)
        guest.hello_due.cancel()
        if hello is None:
            guest.refuse(
                f"The rendezvous speaks version {wire.VERSION} of its protocol, this agent "
                "another: install the same torchelastic on every node."
            )
        elif hello.job != self._job:
            guest.refuse(
                f"The rendezvous belongs to job '{self._job}', not to '{hello.job}': give every "
                "node of a job the same --rdzv-id, and every job a port of its own."
            )
        else:
            self._admit(guest, hello)

    def _admit(self, guest: _Guest, hello: wire.Hello) -> None:
        handler = self._handlers.get(hello.purpose)
        if handler is None:
            guest.refuse(
                f"Nobody here serves '{hello.purpose}': install the same torchelastic on every "
                "node."
            )
            return
        self._forget(guest)
        guest.link.keep_frames()
        handler(guest.link, hello)
