"""One end of a TLS conversation, as bytes in and bytes out: the owner of the socket moves them.

asyncio's own TLS shows a connection only after the handshake: strangers that never finish it could
not be counted and dropped.
"""

from __future__ import annotations

import ssl

from torchelastic.errors import TlsError

_CHUNK = 64 * 1024
#: The first bytes of an alert and of a handshake. As the length of a frame, far beyond the limit.
_FIRST_BYTES = (0x15, 0x16)


def is_tls(data: bytes) -> bool:
    """Return whether a conversation that begins with these bytes is TLS, not plain frames."""
    return data[0] in _FIRST_BYTES


class TlsPipe:
    """One end of TLS. What is written before the handshake is done waits for it."""

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._ready = False
        self._waiting = bytearray()
        #: The peer has said goodbye (close_notify): it sends nothing more, even if its socket stays
        #: open.
        self.ended = False

    def begin(self) -> None:
        """Start the handshake, as the client does."""
        self._shake_hands()

    def decrypt(self, data: bytes) -> bytes:
        """The decrypted data; raises `TlsError` if it cannot be trusted."""
        self._incoming.write(data)
        try:
            if not self._ready:
                self._shake_hands()
            return self._read() if self._ready else b""
        except ssl.SSLError as error:
            raise TlsError(_words(error)) from error

    def encrypt(self, data: bytes) -> None:
        """Encrypt data; `outgoing` has it then."""
        if self._ready:
            self._tls.write(data)
        else:
            self._waiting += data

    def outgoing(self) -> bytes:
        """The bytes to send now."""
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
        try:
            while data := self._tls.read(_CHUNK):
                said += data
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        return bytes(said)


def _words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).replace("_", " ").lower()
