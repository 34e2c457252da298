"""A bucket lets through what its rate allows, and no more."""

import contextlib
import doctest
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import Authority
from torchelastic.config import LaunchConfig
from torchelastic.snapshot.node import stream
from torchelastic.snapshot.node.stream import BURST, Bucket, SnapshotStream
from torchelastic.transport import credentials
from torchelastic.transport.tls import TlsPipe


def test_doctests_hold():
    assert doctest.testmod(stream).failed == 0


def test_no_rate_is_no_limit():
    assert Bucket(0).take(10**12, 1.0) == 0.0


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=50))
def test_over_any_time_it_is_the_rate_and_what_was_saved_up(takes):
    bucket, now, taken, rate = Bucket(1000), 0.0, 0, 1000
    for size, pause in takes:
        now += pause
        now += bucket.take(size, now)
        taken += size
        assert taken <= rate * now + rate * BURST + 1


def test_time_that_passes_unused_is_not_saved_up_without_end():
    bucket = Bucket(1000)
    bucket.take(0, 0.0)
    assert bucket.take(1000, 100.0) == pytest.approx(1 - BURST)


def test_stream_ends_when_the_tls_peer_says_goodbye_and_stays_connected(tmp_path):
    authority = Authority(tmp_path, "ours")
    issued = authority.issue("node")
    shown = credentials.load(
        LaunchConfig(rdzv_tls_cert=issued.cert, rdzv_tls_key=issued.key, rdzv_tls_ca=authority.cert)
    )
    ours, theirs = socket.socketpair()
    stream = SnapshotStream(ours, TlsPipe(shown.server_tls, server=True))
    with theirs, contextlib.closing(stream), ThreadPoolExecutor(1) as pool:
        received = pool.submit(stream.receive, 4)
        theirs.settimeout(30)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = shown.client_tls.wrap_bio(incoming, outgoing)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                theirs.sendall(outgoing.read())
                incoming.write(theirs.recv(65536))
        client.write(b"last words")
        with contextlib.suppress(ssl.SSLWantReadError):
            client.unwrap()
        theirs.sendall(outgoing.read())
        assert received.result(30) == b"last"
        assert stream.receive(6) == b" words"
        with pytest.raises(EOFError):
            stream.receive(1)
