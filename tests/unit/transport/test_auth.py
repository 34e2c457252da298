"""The secret and its proofs, without a connection."""

from __future__ import annotations

import pickle

import pytest

from torchelastic.errors import ConfigError
from torchelastic.transport import auth as secrets
from torchelastic.transport.auth import Secret

KEY = b"0123456789abcdef0123456789abcdef"
HELLO = b'{"kind":"hello"}'


def test_secret_holder_can_prove_it():
    ours, theirs = Secret(KEY), Secret(KEY)
    nonce = secrets.new_nonce()
    assert ours.proves(theirs.proof("client", HELLO, nonce), "client", HELLO, nonce)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda nonce: Secret(KEY + b"x").proof("client", HELLO, nonce),
        lambda nonce: Secret(KEY).proof("server", HELLO, nonce),
        lambda nonce: Secret(KEY).proof("client", HELLO + b" ", nonce),
        lambda nonce: Secret(KEY).proof("client", HELLO, secrets.new_nonce()),
        lambda nonce: "",
        lambda nonce: "\ud800é" * 32,
    ],
    ids=["another secret", "another role", "another hello", "another nonce", "none", "no ASCII"],
)
def test_nothing_else_is_taken_for_a_proof(wrong):
    nonce = secrets.new_nonce()
    assert not Secret(KEY).proves(wrong(nonce), "client", HELLO, nonce)


def test_a_secret_of_the_wrong_length_is_refused():
    assert Secret(KEY + b"\r\n").reveal() == KEY, "the end of a file's line does not count"
    for key in (b"", b"short", b" " * 40, b"fifteen bytes..", b"x" * 4097):
        with pytest.raises(ConfigError, match="openssl rand"):
            Secret(key)


def test_secret_cannot_be_printed_or_pickled():
    secret = Secret(KEY)
    credentials = secrets.Credentials(secret)
    for text in (repr(secret), str(secret), f"{secret}", repr(credentials), f"{[secret]}"):
        assert KEY.decode() not in text
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert not hasattr(secret, "__dict__")


def test_nonces_differ_and_nothing_else_is_taken_for_one():
    first, second = secrets.new_nonce(), secrets.new_nonce()
    assert first != second
    assert secrets.is_nonce(first)
    for text in ("", "0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n", "\u0660" * 64):
        assert not secrets.is_nonce(text), text
