"""Admission to a listener: limits, strangers, greetings, redirections."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import gc
import logging
import ssl
from collections.abc import AsyncIterator

import pytest

from tests.certificates import Authority
from tests.fuzz import NOISE, Fuzzer, greetings
from tests.support import SOAK
from tests.unit.rendezvous.cast import run, serving, soon, story
from tests.unit.transport.cast import (
    JOB,
    SECRET,
    call,
    echoed,
    frame,
    receiving,
    stranger,
)
from torchelastic.clock import SystemClock
from torchelastic.config import LaunchConfig
from torchelastic.errors import ConfigError, RendezvousLost, RendezvousRefused
from torchelastic.transport import credentials, frames, listener
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.auth import ANONYMOUS, Credentials, Secret, new_nonce
from torchelastic.transport.connect import Endpoint, connect_once, connect_to_host
from torchelastic.transport.link import Link
from torchelastic.transport.listener import AdmissionLimits, Listener, Told


@contextlib.asynccontextmanager
async def answering(answer: frames.Message | None = None) -> AsyncIterator[Listener]:
    """A reception whose handler of the store answers as told, or that has no handler."""
    listener = Listener(JOB)

    def handle(link: Link, _: frames.Hello) -> None:
        assert answer is not None
        link.send(answer)
        link.close()

    if answer is not None:
        listener.serve(frames.STORE, handle)
    sockets = bind_endpoint("127.0.0.1", 0)
    assert sockets is not None
    await listener.listen(sockets)
    try:
        yield listener
    finally:
        await listener.close()


async def call_host(port: int, timeout: float = 10.0) -> frames.Welcome:
    link, welcome, _ = await connect_to_host(
        [Endpoint("127.0.0.1", port, JOB)], None, timeout=timeout, clock=SystemClock()
    )
    link.abort()
    return welcome


@story
async def test_a_purpose_nobody_serves_is_refused():
    async with answering() as listener:
        with pytest.raises(RendezvousRefused, match="This agent does not serve 'store'"):
            await call_host(listener.port)


@story
async def test_client_of_the_wrong_agent_is_redirected_to_the_host():
    async with serving() as host:
        # The first address is nobody's: the next one is asked.
        places = ["127.0.0.1:1", f"127.0.0.1:{host.port}"]
        async with answering(frames.Elsewhere(places, 1)) as other:
            assert (await call_host(other.port)).protocol == frames.PROTOCOL


@story
async def test_agents_that_name_each_other_are_asked_once_in_an_attempt():
    places: list[str] = []
    answer = frames.Elsewhere(places, 1)
    async with answering(answer) as one, answering(answer) as other:
        places += [f"127.0.0.1:{agent.port}" for agent in (one, other)]
        with pytest.raises(RendezvousLost, match="no node hosts the rendezvous yet"):
            await call_host(one.port, timeout=0.05)


# --- limits ---------------------------------------------------------------------------------------


def test_doctests_hold():
    assert doctest.testmod(listener).failed == 0


@pytest.mark.parametrize(
    ("most", "of_a_source", "sources", "gone"),
    [
        (3, 3, "aaa", []),
        (3, 3, "aaaa", [0]),
        (9, 2, "aaaa", [0, 1]),
        (9, 2, "ababab", [0, 1]),
        (3, 2, "abcd", [0]),
        # The others of a full source go first; who came earlier from elsewhere stays.
        (4, 2, "baaaaa", [1, 2, 3]),
    ],
)
def test_limits_beyond_the_most_drop_the_oldest(most, of_a_source, sources, gone):
    waiting: AdmissionLimits[int] = AdmissionLimits(most, of_a_source)
    displaced = [waiting.enter(number, source) for number, source in enumerate(sources)]
    assert [peer for peer in displaced if peer is not None] == gone
    assert set(waiting) == set(range(len(sources))) - set(gone)
    assert len(waiting) == len(sources) - len(gone)


def test_limits_closing_connection_frees_its_slot():
    waiting: AdmissionLimits[str] = AdmissionLimits(2, 2)
    waiting.enter("one", "a")
    waiting.leave("one")
    waiting.leave("one")
    assert waiting.enter("two", "a") is None
    assert waiting.enter("three", "a") is None
    assert "one" not in waiting
    assert waiting.enter("four", "b") == "two"


def test_told_reports_each_thing_once_per_source():
    told = Told()
    assert told.first_time("a", "noise")
    assert not told.first_time("a", "noise")
    assert told.first_time("a", "silence")
    assert told.first_time("b", "noise")


def test_sources_not_seen_for_long_are_forgotten():
    told = Told(most=2)
    assert [told.first_time(source, "noise") for source in "abab"] == [True, True, False, False]
    assert told.first_time("c", "noise")
    assert [told.first_time(source, "noise") for source in "bca"] == [False, False, True]


# --- strangers ------------------------------------------------------------------------------------

# Whatever comes to the port: the connection that sends it ends, nothing else is affected.

SHOWN = Credentials(SECRET)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@story
async def test_noise_ends_the_connection_that_made_it(secret):
    async with receiving(secret=secret, patience=0.2) as (listener, echo):
        member = await call(listener.port, Credentials(secret))
        no_nonce = frames.Hello(frames.PROTOCOL, frames.VERSION, JOB, None, nonce="none")
        for noise in (*NOISE, frames.pack(no_nonce)):
            async with stranger(listener.port) as noisy:
                noisy.say(noise)
                assert b"challenge" not in await noisy.end()
        await soon(lambda: listener.visitors == 0, "the strangers are gone")
        assert await echoed(member)
        assert len(echo.links) == 1


@story
async def test_stranger_before_admission_can_send_little():
    async with receiving() as (listener, echo):
        async with stranger(listener.port) as large:
            large.say(frame(b"x" * (frames.GREETING_LIMIT + 1)))
            assert await large.end() == b""
        member = await call(listener.port)
        assert await echoed(member, b"x" * frames.FRAME_LIMIT)
        member.send((frames.FRAME_LIMIT + 1).to_bytes(4, "big"))
        await asyncio.wait_for(asyncio.shield(echo.links[0].ended), 10)


@story
async def test_a_greeting_has_its_time_however_slowly_it_comes():
    async with receiving(secret=SECRET, patience=0.1) as (listener, echo):
        async with stranger(listener.port) as silent:
            assert await silent.end() == b""
        async with stranger(listener.port) as slow:
            # One that says hello and then nothing has no more time than the others.
            hello = frames.Hello(frames.PROTOCOL, frames.VERSION, JOB, None, nonce="0" * 64)
            slow.say(frames.pack(hello))
            assert b"challenge" in await slow.hear()
            assert await slow.end() == b""
        assert listener.visitors == 0
        assert not echo.links


@story
async def test_thousands_who_say_nothing_keep_nobody_out(caplog):
    async with (
        receiving(secret=SECRET, most_visitors=40) as (listener, _),
        contextlib.AsyncExitStack() as crowd,
    ):
        member = await call(listener.port, SHOWN)
        for number in range(120):
            await crowd.enter_async_context(stranger(listener.port))
            if number % 40 == 0:
                assert await echoed(await call(listener.port, SHOWN))
        assert await echoed(member)
        await soon(lambda: listener.visitors == 20, "half of the room is left to other sources")
    assert caplog.text.count("too many connections without a hello") == 1


@story
async def test_each_source_is_logged_once(caplog):
    caplog.set_level(logging.DEBUG, logger="torchelastic")
    async with receiving(secret=SECRET) as (listener, _):
        for _ in range(5):
            async with stranger(listener.port) as noisy:
                noisy.say(b"GET / HTTP/1.1\r\n\r\n")
                await noisy.end()
        async with stranger(listener.port):
            pass  # a look whether the port is open, as load balancers have
    assert len(caplog.records) == 1
    assert "Rejected a connection from 127.0.0.1: not a torchelastic node" in caplog.text


@story
async def test_frames_that_nobody_takes_do_not_fill_the_memory():
    async with receiving() as (listener, echo):
        member = await call(listener.port)
        echo.links[0].keep_frames()
        payload = b"x" * 100_000
        for _ in range(200):
            member.send(frame(payload))
        taken = [await asyncio.wait_for(echo.links[0].next_frame(), 10) for _ in range(200)]
        assert taken == [payload] * 200


@story
async def test_link_reader_that_gives_up_logs_nothing():
    printed = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: printed.append(what))
    async with receiving() as (listener, echo):
        member = await call(listener.port)
        member.next_frame()
        echo.links[0].abort()
        await asyncio.wait_for(asyncio.shield(member.ended), 10)
        del member
        gc.collect()
    assert printed == []


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@story
async def test_fuzzed_greetings(secret):
    fuzzer = Fuzzer(4)
    async with receiving(secret=secret, patience=0.5) as (listener, _):
        member = await call(listener.port, Credentials(secret))
        for number in range(100 * SOAK):
            async with stranger(listener.port) as bad:
                for piece in fuzzer.pieces(fuzzer.message(greetings(JOB))):
                    bad.say(piece)
            if number % 50 == 0:
                assert await echoed(member)
                assert await echoed(await call(listener.port, Credentials(secret)))
        await soon(lambda: listener.visitors == 0, "all of them are gone")


# --- greeting -------------------------------------------------------------------------------------

# The greeting: both ends have the secret, or nothing comes of it.

OTHER = Secret(b"the secret of another job")


def hello(nonce: str = "", job: str = JOB) -> frames.Hello:
    return frames.Hello(frames.PROTOCOL, frames.VERSION, job, None, frames.STORE, 0, nonce)


# The secret


@story
async def test_greeting_with_the_secret_on_both_sides_succeeds():
    async with receiving(secret=SECRET) as (listener, echo):
        link = await call(listener.port, Credentials(Secret(SECRET.reveal())))
        assert await echoed(link)
        assert (echo.hellos[0].job, echo.links[0].remote_addr) == (JOB, "127.0.0.1")


@pytest.mark.parametrize(
    ("theirs", "ours", "sentence"),
    [
        (SECRET, Credentials(OTHER), "different secret: give every node"),
        (SECRET, ANONYMOUS, "has a secret, but this node has none: give every node"),
        (None, Credentials(SECRET), "has a secret, but the rendezvous has none: give every node"),
    ],
    ids=["another one", "none here", "none there"],
)
@story
async def test_one_sentence_tells_what_is_wrong_with_the_secret(theirs, ours, sentence):
    async with receiving(secret=theirs) as (listener, echo):
        with pytest.raises(RendezvousRefused, match=sentence) as refusal:
            await call(listener.port, ours)
        assert "--rdzv-secret-file or TORCHELASTIC_SECRET" in str(refusal.value)
        assert not echo.links


@story
async def test_greeting_for_another_job_is_refused_with_a_reason():
    async with receiving(secret=SECRET) as (listener, _):
        with pytest.raises(RendezvousRefused, match="belongs to job 'job-1', not to 'job-2'"):
            await call(listener.port, Credentials(SECRET), job="job-2")


@story
async def test_a_stranger_learns_nothing_about_the_job():
    async with receiving(secret=SECRET, job="confidential") as (listener, echo):
        for first in (hello(), hello(new_nonce()), hello(new_nonce(), "confidential")):
            async with stranger(listener.port) as spy:
                spy.say(frames.pack(first))
                heard = await spy.hear()
                if first.nonce:
                    spy.say(frames.pack(frames.Proof("0" * 64)))
                heard += await spy.end()
            assert b"confidential" not in heard
            assert SECRET.reveal() not in heard
            assert b"welcome" not in heard
        assert not echo.links


@story
async def test_greeting_replayed_on_another_connection_is_refused():
    async with receiving(secret=SECRET) as (listener, echo):
        first = frames.pack(hello(new_nonce()))
        async with stranger(listener.port) as node:
            node.say(first)
            challenge = frames.parse(await node.hear(), frames.ANSWERS_TO_HELLO)
            assert isinstance(challenge, frames.Challenge)
            made = SECRET.proof("client", frames.payload_of(first), challenge.nonce)
            proof = frames.pack(frames.Proof(made))
            node.say(proof)
            assert b"welcome" in await node.hear()
        async with stranger(listener.port) as spy:
            spy.say(first)
            assert b"challenge" in await spy.hear()
            spy.say(proof)
            assert await spy.end() == b""
        assert len(echo.links) == 1


@story
async def test_the_servers_own_proof_does_not_open_its_door():
    async with receiving(secret=SECRET) as (listener, echo), stranger(listener.port) as spy:
        spy.say(frames.pack(hello(new_nonce())))
        challenge = frames.parse(await spy.hear(), frames.ANSWERS_TO_HELLO)
        assert isinstance(challenge, frames.Challenge)
        spy.say(frames.pack(frames.Proof(challenge.proof)))
        assert await spy.end() == b""
        assert not echo.links


@pytest.mark.parametrize(
    "answers",
    [
        [frames.Challenge(new_nonce(), "0" * 64)],
        [frames.Challenge("not a nonce", "0" * 64)],
        [frames.Welcome(frames.PROTOCOL, frames.VERSION, "trap", False)],
        [frames.Elsewhere(["127.0.0.1:1"], 9)],
        [frames.Challenge("\ud800", "\udfff")],
        [frames.Refusal("no secret.\n[torchelastic] all is well")],
    ],
    ids=["no proof", "no nonce", "a welcome", "elsewhere", "no text", "a forged line of the log"],
)
@story
async def test_a_node_does_not_follow_whoever_took_the_hosts_place(answers):
    heard: list[bytes] = []

    async def trap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readexactly(4))
        heard.append(await reader.readexactly(int.from_bytes(heard[0], "big")))
        for answer in answers:
            writer.write(frames.pack(answer))
        heard.append(await reader.read())
        writer.close()

    listener = await asyncio.start_server(trap, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(RendezvousRefused, match="secret") as refusal:
            await call(port, Credentials(SECRET))
        assert "\n" not in str(refusal.value)
        while len(heard) < 3:
            await asyncio.sleep(0.001)
    # No proof, which a thief of the port could try secrets on.
    assert heard[2] == b""
    assert SECRET.reveal() not in heard[1]


# Where it comes from


def test_the_file_is_taken_before_the_variable(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_bytes(b"of the file, long enough\n")
    monkeypatch.setenv(credentials.VARIABLE, "of the variable, long enough")
    by_file = credentials.load_secret(LaunchConfig(rdzv_secret_file=str(path)))
    by_variable = credentials.load_secret(LaunchConfig())
    assert by_file is not None
    assert by_variable is not None
    assert by_file.reveal() == b"of the file, long enough"
    assert by_variable.reveal() == b"of the variable, long enough"
    monkeypatch.delenv(credentials.VARIABLE)
    assert credentials.load_secret(LaunchConfig()) is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "Cannot read"), (b"too short", "16 to 4096 bytes, not 9"), (b"x" * 9000, "8192")],
)
def test_a_bad_file_is_refused_by_its_name(tmp_path, content, sentence):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as error:
        credentials.load_secret(LaunchConfig(rdzv_secret_file=str(path)))
    assert f"--rdzv-secret-file {path}" in str(error.value)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_every_user_can_read_is_warned_of(tmp_path, caplog, mode, warned):
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef")
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        credentials.load(LaunchConfig(rdzv_secret_file=str(path)))
    assert ("chmod 600" in caplog.text) is warned


JOINS = "This job has no secret: anyone who can reach node1:29400 can join it and stop it."
PASSES = "This job has no secret: anyone who can reach its agents can impersonate one of"


def test_a_job_that_others_can_reach_and_has_no_secret_is_warned_of(caplog, monkeypatch):
    for backend, endpoint, warning in (
        ("c10d", "", ""),
        ("c10d", "localhost:29400", ""),
        ("c10d", "127.0.0.1:29400", ""),
        ("c10d", "[::1]:29400", ""),
        ("c10d", "node1:29400", JOINS),
        ("etcd", "localhost:2379", ""),
        ("etcd", "127.0.0.1:2379,[::1]:2379", ""),
        ("etcd", "10.0.0.1:2379", PASSES),
        ("etcd-v2", "localhost:2379,etcd1:2379", PASSES),
        ("etcd-v3", "etcd1", PASSES),
    ):
        caplog.clear()
        monkeypatch.delenv(credentials.VARIABLE, raising=False)
        config = LaunchConfig(rdzv_backend=backend, rdzv_endpoint=endpoint)
        credentials.load(config)
        assert warning in caplog.text, endpoint
        assert ("This job has no secret" in caplog.text) is bool(warning), endpoint
        caplog.clear()
        monkeypatch.setenv(credentials.VARIABLE, "0123456789abcdef")
        credentials.load(config)
        assert not caplog.text, endpoint


# TLS


class Files:
    """The certificates of a node."""

    def __init__(self, ours: Authority, trusted: Authority) -> None:
        issued = ours.issue("node")
        self.config = LaunchConfig(
            rdzv_tls_cert=issued.cert, rdzv_tls_key=issued.key, rdzv_tls_ca=trusted.cert
        )

    def load(self) -> Credentials:
        return credentials.load(self.config)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "theirs")


@pytest.fixture(scope="module")
def shown(authority: Authority) -> Credentials:
    return Files(authority, authority).load()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@story
async def test_nodes_speak_tls_with_and_without_a_secret(shown, secret):
    both = Credentials(secret, shown.server_tls, shown.client_tls)
    async with receiving(secret=secret, tls=both.server_tls) as (listener, _):
        link = await call(listener.port, both)
        for size in (1, 100, 70_000, frames.FRAME_LIMIT):
            assert await echoed(link, b"x" * size)
        link.close()
        await link.ended


@story
async def test_messages_cannot_be_read_on_the_way(shown):
    passed: list[bytes] = []

    async with receiving(tls=shown.server_tls) as (listener, _):
        tapped = await _tap(listener.port, passed)
        async with tapped:
            port = tapped.sockets[0].getsockname()[1]
            link = await call(port, shown)
            assert await echoed(link, b"confidential")
            link.close()
            await link.ended
            for _ in range(3):
                await asyncio.sleep(0)
    assert passed
    assert b"confidential" not in b"".join(passed)
    assert b"hello" not in b"".join(passed)


async def _tap(port: int, passed: list[bytes]) -> asyncio.Server:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            passed.append(data)
            writer.write(data)
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, far[1]), pump(far[0], writer))

    return await asyncio.start_server(connect, "127.0.0.1", 0)


def test_a_certificate_of_another_authority_is_refused_at_both_ends(
    authority, other_authority, shown
):
    stranger_there = Files(other_authority, authority).load()
    stranger_here = Files(authority, other_authority).load()

    async def story(theirs: Credentials, ours: Credentials):
        async with receiving(tls=theirs.server_tls) as (listener, echo):
            with pytest.raises(RendezvousRefused, match=r"TLS handshake with .* failed") as error:
                await call(listener.port, ours)
            assert "--rdzv-tls-ca" in str(error.value)
            assert not echo.links

    run(story(shown, stranger_there))
    run(story(stranger_there, shown))
    run(story(shown, stranger_here))


@pytest.mark.parametrize(
    ("with_tls", "sentence"),
    [
        ("there", "Some nodes use TLS and some do not"),
        ("here", "TLS handshake with .* failed .the peer does not use TLS"),
    ],
)
@story
async def test_a_node_with_tls_and_one_without_do_not_meet_and_both_get_a_reason(
    shown, with_tls, sentence
):
    theirs, ours = (shown, ANONYMOUS) if with_tls == "there" else (ANONYMOUS, shown)
    async with receiving(tls=theirs.server_tls) as (listener, echo):
        with pytest.raises(RendezvousRefused, match=sentence) as error:
            await call(listener.port, ours)
        assert "or none" in str(error.value)
        assert not echo.links


@story
async def test_garbage_instead_of_tls_ends_the_connection(shown, caplog):
    async with receiving(tls=shown.server_tls) as (listener, echo):
        for noise in (frame(b"{}"), b"\x16\x03\x01" + b"\xff" * 500, b"\x80" * 4000):
            async with stranger(listener.port) as spy:
                spy.say(noise)
                await spy.end()
        link = await call(listener.port, shown)
        assert await echoed(link)
        assert len(echo.links) == 1
    assert caplog.text.count("TLS handshake failed") == 1


@story
async def test_tls_peer_that_says_goodbye_is_disconnected_and_the_others_stay(shown):
    """As `openssl s_client </dev/null` does, which keeps its end open until ours is closed."""
    async with receiving(tls=shown.server_tls) as (listener, echo):
        member = await call(listener.port, shown)
        async with stranger(listener.port) as leaving:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = shown.client_tls.wrap_bio(incoming, outgoing)
            with pytest.raises(ssl.SSLWantReadError):
                client.do_handshake()
            leaving.say(outgoing.read())
            for _ in range(200):
                incoming.write(await leaving.some())
                with contextlib.suppress(ssl.SSLWantReadError):
                    client.do_handshake()
                    break
            client.write(frames.pack(hello()))
            with pytest.raises(ssl.SSLWantReadError):
                client.unwrap()
            leaving.say(outgoing.read())
            incoming.write(await leaving.end())
            assert b"welcome" in client.read()  # what was said before the goodbye is answered
        assert await echoed(member)
        assert len(echo.links) == 2


@pytest.mark.parametrize("missing", ["rdzv_tls_cert", "rdzv_tls_key", "rdzv_tls_ca"])
def test_files_that_cannot_be_used_are_named(authority, tmp_path, missing):
    issued = authority.issue("named")
    files = {
        "rdzv_tls_cert": issued.cert,
        "rdzv_tls_key": issued.key,
        "rdzv_tls_ca": authority.cert,
    }
    (tmp_path / "empty").touch()
    for path in ("nowhere", "empty"):
        config = LaunchConfig(**{**files, missing: str(tmp_path / path)})
        with pytest.raises(ConfigError, match=f"Cannot use .*{path}"):
            credentials.load(config)
    del files[missing]
    with pytest.raises(ConfigError, match="belong together"):
        LaunchConfig(**files)


@story
async def test_a_link_that_never_connects_leaves_nothing(shown):
    with pytest.raises(OSError, match=r"[Cc]onnect"):
        await connect_once(Endpoint("127.0.0.1", 1, JOB, shown), timeout=5)
