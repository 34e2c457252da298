"""One end of a TLS conversation, as bytes in and bytes out: whoever has the socket moves them.

asyncio has TLS of its own, but it shows a connection only once the handshake is done: strangers
who never do it would be nobody's to count and to drop.
"""

from __future__ import annotations

import ssl

from torchelastic.errors import TlsError

_CHUNK = 64 * 1024
#: How an alert and a handshake begin. As the length of a frame it would be far too much.
_FIRST_BYTES = (0x15, 0x16)


def is_tls(data: bytes) -> bool:
    """Whether a conversation that begins so is TLS, and not frames in the clear."""
    return data[0] in _FIRST_BYTES


class TlsPipe:
    """What is written before the handshake is done waits for it."""

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._ready = False
        self._waiting = bytearray()

    def begin(self) -> None:
        """Say the first words, as the client does."""
        self._shake_hands()

    def decrypt(self, data: bytes) -> bytes:
        """What the other end has said; raises `TlsError` if it is not to be trusted."""
        self._incoming.write(data)
        try:
            if not self._ready:
                self._shake_hands()
            return self._read() if self._ready else b""
        except ssl.SSLError as error:
            raise TlsError(_words(error)) from error

    def encrypt(self, data: bytes) -> None:
        """Have something to say; `outgoing` has it then."""
        if self._ready:
            self._tls.write(data)
        else:
            self._waiting += data

    def outgoing(self) -> bytes:
        """What is to be sent now."""
        return self._outgoing.read()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self._ready = True
        if self._waiting:
            self._tls.write(self._waiting)
            self._waiting = bytearray()

    def _read(self) -> bytes:
        said = bytearray()
        while True:
            try:
                said += self._tls.read(_CHUNK)
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                # The second: it says goodbye, and will close the connection.
                return bytes(said)


def _words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).replace("_", " ").lower()
