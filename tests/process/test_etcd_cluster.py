"""An etcd of several servers, some of which fail; and one that wants to know who we are."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
import ssl

import pytest

from tests.certificates import Authority
from tests.etcd import FAST, Etcd, cluster, running
from tests.support import poll_for
from tests.unit.rendezvous.cast import within
from torchelastic.errors import RendezvousLost, RendezvousRefused
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore
from torchelastic.rendezvous.etcd.settings import EtcdSettings, Login, TlsFiles

PATIENCE = 20.0


@pytest.fixture
def run_id():
    return secrets.token_hex(4)


@contextlib.asynccontextmanager
async def connected(servers: list[Etcd], run_id: str, **options):
    addresses = [server.address for server in servers]
    store = await EtcdStore.connect(addresses, run_id, timeout=PATIENCE, **options)
    try:
        yield store
    finally:
        await store.close()


async def next_of(changes):
    return await within(PATIENCE, changes.__anext__())


def leader_first(members: list[Etcd]) -> list[Etcd]:
    leader = poll_for(lambda: [m for m in members if m.leads()], what="a leader")[0]
    return [leader, *(member for member in members if member is not leader)]


def test_the_leader_of_a_cluster_may_go(run_id, caplog):
    caplog.set_level(logging.INFO)

    async def story(members):
        async with connected(members, run_id) as store, connected(members[1:], run_id) as other:
            await store.open_lease(60.0)
            await store.put("member/1", {"n": 0}, leased=True)
            changes = store.watch("member/", after=0)
            assert (await next_of(changes)).item.value == {"n": 0}
            await asyncio.to_thread(members[0].stop)
            for n in (1, 2):
                await within(PATIENCE, other.put("member/1", {"n": n}))
                assert (await next_of(changes)).item.value == {"n": n}
            assert await within(PATIENCE, store.keep_alive())
            assert not store.lease_lost.is_set()
            # It stays with the server that answers.
            assert str(store._pool.address) != members[0].endpoint
            await changes.aclose()

    with cluster(3, *FAST) as members:
        asyncio.run(story(leader_first(members)))
    assert "Switched to etcd at 127.0.0.1" in caplog.text


def test_a_frozen_server_is_left_by_calls_and_watches(run_id, monkeypatch):
    monkeypatch.setattr("torchelastic.rendezvous.etcd.connection_pool.ATTEMPT_TIMEOUT", 1.0)

    async def story(members):
        # Not the leader: the cluster itself does not notice.
        followers = members[1:]
        async with connected(followers, run_id) as store, connected(members, run_id) as other:
            changes = store.watch("", after=0)
            await other.put("a", {"n": 1})
            await next_of(changes)
            followers[0].freeze()
            try:
                await other.put("a", {"n": 2})
                assert (await within(PATIENCE, store.get(""))).items["a"].value == {"n": 2}
                assert (await next_of(changes)).item.value == {"n": 2}
            finally:
                followers[0].thaw()
            await changes.aclose()

    with cluster(3, *FAST) as members:
        asyncio.run(story(leader_first(members)))


def test_a_server_without_a_leader_says_so_and_the_next_is_asked(run_id):
    async def story(alone, healthy):
        async with connected([alone, healthy], run_id) as store:
            assert store._pool.address.port == healthy.port
            await store.put("a", {})

    with cluster(3, *FAST) as members, running(*FAST) as healthy:
        for member in members[1:]:
            member.stop()
        poll_for(lambda: not members[0].answers(), what="it notices that it is alone")
        asyncio.run(story(members[0], healthy))


def test_a_watch_ends_at_a_server_that_lost_its_leader_and_goes_on_when_there_is_one(run_id):
    async def story(members):
        async with connected(members[:1], run_id) as store:
            await store.put("a", {"n": 1})
            changes = store.watch("", after=0)
            await next_of(changes)
            for member in members[1:]:
                await asyncio.to_thread(member.stop)
            putting = asyncio.ensure_future(store.put("a", {"n": 2}))
            with pytest.raises(asyncio.TimeoutError):
                await within(1.0, asyncio.shield(putting))
            for member in members[1:]:
                await asyncio.to_thread(member.begin)
            await within(PATIENCE, putting)
            assert (await next_of(changes)).item.value == {"n": 2}
            await changes.aclose()

    with cluster(3, *FAST) as members:
        asyncio.run(story(members))


# --- TLS, and who we are -------------------------------------------------------------------------

HOSTS = ("IP:127.0.0.1", "DNS:localhost")
PASSWORD = "correct horse battery staple"
#: What etcd says about ours comes through or not, as the two ends of TLS happen to run.
CERTIFICATE = "bad certificate|certificate required|does not trust our certificate"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "ca")


def tls_files(authority: Authority, name: str, subject: str = "") -> TlsFiles:
    ours = authority.issue(name, subject=subject)
    return TlsFiles(cacert=authority.cert, cert=ours.cert, key=ours.key)


def serving_tls(authority: Authority):
    """An etcd that shows its certificate, and wants to see one of the same authority."""
    own = authority.issue("etcd", *HOSTS)
    context = ssl.create_default_context(cafile=authority.cert)
    context.load_cert_chain(own.cert, own.key)
    flags = (f"--cert-file={own.cert}", f"--key-file={own.key}", "--client-cert-auth")
    trusted = f"--trusted-ca-file={authority.cert}"
    return running(*FAST, *flags, trusted, tls=context)


def want_logins(etcd: Etcd, user: str) -> None:
    """As an operator does it: a user that may do everything under our prefix, and nothing else."""
    key, end = (base64.b64encode(text).decode() for text in (b"/torchelastic/", b"/torchelastic0"))
    permission = {"permType": "READWRITE", "key": key, "range_end": end}
    for path, request in (
        ("user/add", {"name": "root", "password": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("user/add", {"name": user, "password": PASSWORD}),
        ("role/add", {"name": "jobs"}),
        ("role/grant", {"name": "jobs", "perm": permission}),
        ("user/grant", {"user": user, "role": "jobs"}),
        ("enable", {}),
    ):
        answer = etcd.post(f"/v3/auth/{path}", request)
        assert "header" in answer, answer


async def a_whole_story(store: EtcdStore) -> None:
    """Every verb once."""
    await store.open_lease(60.0)
    changes = store.watch("", after=0)
    revision = await store.put("member/1", {"n": 1}, leased=True)
    assert (await next_of(changes)).revision == revision
    assert await store.keep_alive()
    assert list((await store.get("")).items) == ["member/1"]
    fence = ("member/1", revision)
    beside = {"part/0": {}}
    assert await store.compare_and_set("world", {}, expected=0, beside=beside, provided=fence)
    assert [(await next_of(changes)).key for _ in range(2)] == ["part/0", "world"]
    await changes.aclose()
    await store.end_lease()


def test_tls_with_a_certificate_of_our_own(authority, run_id):
    async def story(port):
        settings = EtcdSettings(tls=tls_files(authority, "node"))
        store = await EtcdStore.connect([("localhost", port)], run_id, timeout=9, settings=settings)
        await a_whole_story(store)
        await store.close()

    with serving_tls(authority) as etcd:
        asyncio.run(story(etcd.port))


def test_untrusted_client_is_rejected_with_a_reason(authority, tmp_path, run_id):
    stranger = Authority(tmp_path, "stranger")
    ours = tls_files(authority, "node")
    false = tls_files(stranger, "node")
    cases = [
        (None, "perhaps etcd expects TLS"),
        (false, "its certificate is not trusted"),
        (TlsFiles(cacert=authority.cert), CERTIFICATE),
        (TlsFiles(cacert=authority.cert, cert=false.cert, key=false.key), CERTIFICATE),
    ]

    async def refused(etcd, tls, sentence):
        settings = EtcdSettings(tls=tls)
        with pytest.raises((RendezvousRefused, RendezvousLost), match=sentence):
            await within(
                PATIENCE,
                EtcdStore.connect([etcd.address], run_id, timeout=0.2, settings=settings),
            )

    with serving_tls(authority) as etcd:
        for tls, sentence in cases:
            asyncio.run(refused(etcd, tls, sentence))
    with running(*FAST) as plain:
        asyncio.run(refused(plain, ours, "TLS connection to etcd .* failed|the server has no TLS"))


def test_a_user_with_a_password(authority, run_id, caplog):
    caplog.set_level(logging.DEBUG)
    login = Login("trainer", PASSWORD)

    async def story(etcd, tls):
        settings = EtcdSettings(tls=tls, login=login)
        async with connected([etcd], run_id, settings=settings) as store:
            await a_whole_story(store)
            # A server that was started anew knows no token of before.
            await store.open_lease(60.0)
            changes = store.watch("late/", after=0)
            waiting = asyncio.ensure_future(changes.__anext__())
            await asyncio.to_thread(etcd.stop)
            await asyncio.to_thread(etcd.start)
            await within(PATIENCE, store.put("late/1", {}, leased=True))
            assert (await within(PATIENCE, waiting)).key == "late/1"
            assert await store.keep_alive()
            await changes.aclose()

    with serving_tls(authority) as etcd:
        want_logins(etcd, login.user)
        asyncio.run(story(etcd, tls_files(authority, "node", subject="/O=trainers")))
        with pytest.raises(RendezvousRefused, match=r"certificate has a common name \(CN\)"):
            asyncio.run(story(etcd, tls_files(authority, "named")))
    assert PASSWORD not in caplog.text


def test_unauthorized_user_is_rejected_with_a_reason(run_id):
    async def refused(etcd, settings, sentence):
        with pytest.raises(RendezvousRefused, match=sentence):
            await EtcdStore.connect([etcd.address], run_id, timeout=9, settings=settings)

    with running(*FAST) as etcd:
        want_logins(etcd, "trainer")
        for settings, sentence in (
            (EtcdSettings(), "name a user, with etcd_user"),
            (EtcdSettings(login=Login("trainer", "no")), "rejected user 'trainer'"),
            (EtcdSettings(login=Login("nobody", "no")), "rejected user 'nobody'"),
            (EtcdSettings(login=Login("trainer", PASSWORD), prefix="/x"), "under etcd_prefix"),
        ):
            asyncio.run(refused(etcd, settings, sentence))


def test_a_password_that_nobody_asks_for_is_ignored(run_id, caplog):
    async def story(etcd):
        settings = EtcdSettings(login=Login("trainer", PASSWORD))
        async with connected([etcd], run_id, settings=settings) as store:
            await a_whole_story(store)

    with running(*FAST) as etcd:
        asyncio.run(story(etcd))
    assert "is ignored" in caplog.text
    assert PASSWORD not in caplog.text
