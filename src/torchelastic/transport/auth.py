"""The secret that the nodes of a job share, and how both ends of a connection prove it. Pure.

    client                          server
    hello, with a nonce        ->
                               <-   challenge: another nonce, and the server's proof
    the client's proof         ->
                               <-   welcome

A proof is an HMAC-SHA256 under the secret, of the prover's role, the whole hello (the protocol, its
version, the job, the purpose, the client's nonce) and the server's nonce. So neither end can send
back what it received, a proof from one connection is useless on another, and the secret itself is
never sent. An eavesdropper can try out secrets on a proof, so a secret must be long.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from torchelastic.errors import ConfigError

if TYPE_CHECKING:
    import ssl

#: Bytes. Less can be guessed; more would not be a secret but a wrong file.
SHORTEST, LONGEST = 16, 4096

Role = Literal["client", "server"]

_NONCE = re.compile(r"[0-9a-f]{64}")


class Secret:
    """Secret bytes: cannot be printed, compared or pickled."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        # A file made by `echo` or an editor ends in a newline that the variable does not have.
        key = key.strip()
        if not SHORTEST <= len(key) <= LONGEST:
            raise ConfigError(
                f"A secret must have {SHORTEST} to {LONGEST} bytes, not {len(key)}: create one "
                "with openssl rand -hex 32."
            )
        self._key = key

    def reveal(self) -> bytes:
        """The bytes themselves, for one of our own processes."""
        return self._key

    def proof(self, role: Role, hello: bytes, nonce: str) -> str:
        """The proof that `role` has the secret, for `hello` as sent and the server's nonce."""
        said = hashlib.sha256(hello).hexdigest()
        message = f"torchelastic {role} {said} {nonce}"
        return hmac.new(self._key, message.encode(), hashlib.sha256).hexdigest()

    def proves(self, proof: str, role: Role, hello: bytes, nonce: str) -> bool:
        """Return whether this is the proof of `role`, in constant time."""
        # As bytes: `compare_digest` raises for text that is not ASCII, which a stranger may send.
        given = proof.encode(errors="replace")
        return hmac.compare_digest(given, self.proof(role, hello, nonce).encode())

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A secret cannot be pickled: pass it through a file descriptor.")


@dataclass(frozen=True)
class Credentials:
    """The secret and the TLS contexts of a node."""

    secret: Secret | None = None
    #: TLS as a server, and as a client.
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None


ANONYMOUS = Credentials()


def new_nonce() -> str:
    """A number that is used once."""
    return secrets.token_hex(32)


def is_nonce(text: str) -> bool:
    """Return whether a peer's nonce has the form of ours."""
    return _NONCE.fullmatch(text) is not None
