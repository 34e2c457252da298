"""A stranger, or a node gone mad, as a process: `fuzzer.py PORT JOB COUNT SEED RATE [SECRET_FILE]`.

Sends COUNT bad messages, RATE a second at most, and leaves some connections open behind itself.
With the secret, half of them are sent on connections that were admitted.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.fuzz import Fuzzer, between_agents, greetings, reports, requests
from torchelastic.transport import frames
from torchelastic.transport.auth import Secret, new_nonce

#: Connections that are left open, and say nothing more.
IDLE = 50
PATIENCE = 10.0
PURPOSES = (frames.STORE, frames.RING, frames.ELECTION, frames.SNAPSHOT, frames.EVENTS)


class Attacker:
    """Opens connections, says what it should not, and closes them as rudely as it can."""

    def __init__(self, port: int, job: str, seed: int, secret: Secret | None) -> None:
        self._port = port
        self._secret = secret
        self._fuzzer = Fuzzer(seed)
        self._greetings = greetings(job)
        self._requests = requests()
        self._between_agents = between_agents()
        self._job = job
        self._idle: deque[socket.socket] = deque()
        self.sent = 0
        self.admitted = 0

    def attack(self, limit: int) -> None:
        """One connection, with `limit` messages at most."""
        member = self._fuzzer.chance(0.5)
        purpose = self._fuzzer.choice((frames.STORE, *PURPOSES))
        connection = socket.create_connection(("127.0.0.1", self._port), PATIENCE)
        # A reset instead of an end; an end would also keep the local port for a minute.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(ConnectionError, EOFError):
            if not member:
                self._say(connection, partial(self._fuzzer.message, self._greetings), limit)
            elif not self._be_admitted(connection, purpose):
                self.sent += 1
            elif purpose == frames.STORE:
                self._say(connection, partial(self._fuzzer.message, self._requests), limit)
            elif purpose == frames.SNAPSHOT:
                self._say(connection, self._fuzzer.header, limit)
            elif purpose == frames.EVENTS:
                self._say(connection, partial(self._fuzzer.message, reports()), limit)
            else:
                self._say(connection, partial(self._fuzzer.broken, self._between_agents), limit)
        if self._fuzzer.chance(0.1):
            self._idle.append(connection)
            connection = self._idle.popleft() if len(self._idle) > IDLE else connection
        if connection not in self._idle:
            connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def _say(self, connection: socket.socket, make: Callable[[], bytes], limit: int) -> None:
        for _ in range(limit):
            self.sent += 1
            for piece in self._fuzzer.pieces(make()):
                connection.sendall(piece)
            if self._fuzzer.chance(0.3):
                return

    def _be_admitted(self, connection: socket.socket, purpose: str) -> bool:
        """Greet as a node does; whether this is served here."""
        nonce = new_nonce() if self._secret is not None else ""
        hello = frames.pack(
            frames.Hello(frames.PROTOCOL, frames.VERSION, self._job, None, purpose, 0, nonce)
        )
        connection.sendall(hello)
        answer = _receive(connection)
        if self._secret is not None:
            assert isinstance(answer, frames.Challenge), answer
            proof = self._secret.proof("client", frames.payload_of(hello), answer.nonce)
            connection.sendall(frames.pack(frames.Proof(proof)))
            answer = _receive(connection)
        served = isinstance(answer, frames.Welcome)
        self.admitted += served
        return served


def _receive(connection: socket.socket) -> frames.Message:
    unpacker = frames.Unpacker()
    while data := connection.recv(4096):
        for payload in unpacker.feed(data):
            return frames.parse(payload, frames.ANSWERS_TO_HELLO)
    raise EOFError


def main(port: int, job: str, count: int, seed: int, rate: float, secret: Secret | None) -> None:
    attacker = Attacker(port, job, seed, secret)
    begun = time.monotonic()
    while attacker.sent < count:
        attacker.attack(min(5, count - attacker.sent))
        ahead = attacker.sent / rate - (time.monotonic() - begun)
        if ahead > 0:
            time.sleep(ahead)
    attacker.close()
    print(attacker.sent, attacker.admitted, flush=True)


if __name__ == "__main__":
    key = Secret(Path(sys.argv[6]).read_bytes()) if len(sys.argv) > 6 else None
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]), float(sys.argv[5]), key)
