"""The rendezvous at a real etcd: connections that break, stores that forget, jobs that follow."""

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
from tests.support import FakeClock, poll_for
from tests.unit.rendezvous.cast import Proxy, proxied, story, within
from torchelastic.clock import SystemClock
from torchelastic.errors import LeaseExpired, RendezvousLost, RendezvousRefused, WireError
from torchelastic.rendezvous.etcd.etcd_store import (
    EtcdStore,
    close_store,
    open_store,
    remove_closed_job,
    remove_if_finished,
)
from torchelastic.rendezvous.etcd.settings import EtcdSettings, Login, TlsFiles

PATIENCE = 20.0
#: With leases as short as asked for.
SHORT = EtcdSettings(outage=0.0)


@pytest.fixture
def etcd(some_etcd: Etcd) -> Etcd:
    """One version of it: the contract of stores has both."""
    return some_etcd


@pytest.fixture
def run_id():
    return secrets.token_hex(4)


@contextlib.asynccontextmanager
async def opened(addresses, run_id, **options):
    store = await EtcdStore.connect(addresses, run_id, timeout=PATIENCE, **options)
    try:
        yield store
    finally:
        await store.close()


def connected(port, run_id, **options):
    return opened([("127.0.0.1", port)], run_id, **options)


async def next_of(changes):
    return await within(PATIENCE, changes.__anext__())


async def ask(etcd: Etcd, path: str, request: dict) -> dict:
    """A request as an operator makes it with etcdctl."""
    return await asyncio.to_thread(etcd.post, path, request)


# --- connections that break ----------------------------------------------------------------------


@story
async def test_a_lost_connection_is_made_again_unseen(etcd, run_id):
    async with proxied(etcd.port) as proxy, connected(proxy.port, run_id) as store:
        await store.open_lease(60.0)
        await store.put("member/1", {"n": 0}, leased=True)
        changes = store.watch("member/", after=0)
        assert (await next_of(changes)).item.value == {"n": 0}
        for n in range(1, 6):
            await proxy.cut()
            await store.put("member/1", {"n": n}, leased=True)
            assert (await next_of(changes)).item.value == {"n": n}
        assert await store.keep_alive()
        await changes.aclose()


@story
async def test_etcd_watch_reports_changes_made_while_disconnected(etcd, run_id):
    async with (
        proxied(etcd.port) as proxy,
        connected(proxy.port, run_id) as cut_off,
        connected(etcd.port, run_id) as other,
    ):
        changes = cut_off.watch("", after=0)
        await other.put("a", {"n": 0})
        await next_of(changes)
        await proxy.shut()
        for n in range(1, 4):
            await other.put("a", {"n": n})
        waiting = asyncio.ensure_future(cut_off.get(""))
        await asyncio.sleep(0)
        await proxy.open()
        assert [(await next_of(changes)).item.value["n"] for _ in range(3)] == [1, 2, 3]
        assert (await within(PATIENCE, waiting)).items["a"].value == {"n": 3}
        await changes.aclose()


async def answer_lost(proxy: Proxy, verb, done) -> object:
    """Let a request through, lose its answer, and see what its second attempt says."""
    proxy.answers.clear()
    asking = asyncio.ensure_future(verb)
    while not await done():
        await asyncio.sleep(0.005)
    await proxy.cut()
    proxy.answers.set()
    return await within(PATIENCE, asking)


@pytest.mark.parametrize("leased", [False, True])
@story
async def test_a_write_whose_answer_got_lost_is_done_once(etcd, run_id, leased):
    async with (
        proxied(etcd.port) as proxy,
        connected(proxy.port, run_id) as store,
        connected(etcd.port, run_id) as other,
    ):
        await store.open_lease(60.0)
        verb = store.compare_and_set("leader", {"n": 1}, expected=0, leased=leased)

        async def written(key="leader"):
            return key in (await other.get("")).items

        revision = await answer_lost(proxy, verb, written)
        assert revision == (await other.get("")).items["leader"].modified
        put = store.put("member", {"n": 2}, leased=leased)
        revision = await answer_lost(proxy, put, lambda: written("member"))
        listing = await other.get("")
        assert revision == listing.items["member"].modified == listing.items["member"].created


@story
async def test_a_lease_whose_grant_got_lost_is_one_lease(etcd, run_id):
    async with proxied(etcd.port) as proxy, connected(proxy.port, run_id) as store:
        before = await ask(etcd, "/v3/lease/leases", {})

        async def granted():
            now = await ask(etcd, "/v3/lease/leases", {})
            return len(now.get("leases", [])) > len(before.get("leases", []))

        await answer_lost(proxy, store.open_lease(60.0), granted)
        assert await store.keep_alive()
        await store.put("a", {}, leased=True)


@story
async def test_an_etcd_that_stays_away_is_lost(etcd, run_id):
    async with (
        proxied(etcd.port) as proxy,
        connected(proxy.port, run_id, reconnect_timeout=0.3) as store,
    ):
        await store.open_lease(60.0)
        changes = store.watch("", after=0)
        waiting = asyncio.ensure_future(changes.__anext__())
        await store.put("a", {})
        await within(PATIENCE, waiting)
        waiting = asyncio.ensure_future(changes.__anext__())
        await proxy.shut()
        for verb in (store.get(""), waiting, store.put("b", {}), store.open_lease(1.0)):
            with pytest.raises(RendezvousLost, match=r"no answer for 0.3 s \(connection"):
                await within(PATIENCE, verb)
        assert store.lease_lost.is_set()


@story
async def test_lease_ends_by_our_own_clock_while_etcd_is_away_and_opens_again(etcd, run_id):
    async with (
        proxied(etcd.port) as proxy,
        connected(proxy.port, run_id, settings=SHORT) as store,
        connected(etcd.port, run_id) as other,
    ):
        await store.open_lease(1.1)
        await store.put("member/1", {}, leased=True)
        changes = other.watch("member/", after=0)
        await next_of(changes)
        await proxy.shut()
        gone = asyncio.ensure_future(next_of(changes))
        await within(PATIENCE, store.lease_lost.wait())
        # etcd knows leases of whole seconds: for the others the node is still there.
        assert not gone.done()
        with pytest.raises(LeaseExpired):
            await store.put("member/1", {}, leased=True)
        await proxy.open()
        await within(PATIENCE, store.open_lease(60.0))
        assert not store.lease_lost.is_set()
        assert (await gone).item is None
        assert (await other.get("")).items == {}
        await store.put("member/1", {}, leased=True)
        await changes.aclose()


@story
async def test_a_lease_that_etcd_has_ended_is_noticed(etcd, run_id):
    async with connected(etcd.port, run_id, settings=SHORT) as store:
        for notice in ("put", "keep_alive", "by itself"):
            await store.open_lease(0.9 if notice == "by itself" else 60.0)
            await ask(etcd, "/v3/lease/revoke", {"ID": str(store._granted)})
            if notice == "put":
                with pytest.raises(LeaseExpired, match="dropped this node"):
                    await store.put("a", {}, leased=True)
            elif notice == "keep_alive":
                assert not await store.keep_alive()
            await within(PATIENCE, store.lease_lost.wait())


@story
async def test_a_frozen_etcd_holds_verbs_up_until_it_goes_on(run_id, monkeypatch):
    monkeypatch.setattr("torchelastic.rendezvous.etcd.connection_pool.ATTEMPT_TIMEOUT", 0.3)
    with running(*FAST) as etcd:
        async with connected(etcd.port, run_id) as store:
            await store.put("a", {"n": 1})
            etcd.freeze()
            waiting = asyncio.ensure_future(store.put("a", {"n": 2}))
            with pytest.raises(asyncio.TimeoutError):
                await within(1.0, asyncio.shield(waiting))
            etcd.thaw()
            await within(PATIENCE, waiting)
            assert (await store.get("")).items["a"].value == {"n": 2}


@story
async def test_a_watch_goes_on_after_what_it_asked_for_was_compacted_away(etcd, run_id):
    async with (
        proxied(etcd.port) as proxy,
        connected(proxy.port, run_id) as cut_off,
        connected(etcd.port, run_id) as other,
    ):
        await other.open_lease(60.0)
        await other.put("m/stays", {"n": 1})
        await other.put("m/goes", {}, leased=True)
        changes = cut_off.watch("m/", after=(await cut_off.get("m/")).revision)
        waiting = asyncio.ensure_future(changes.__anext__())
        await proxy.shut()
        await other.put("m/stays", {"n": 2})
        await other.put("m/stays", {"n": 3})
        await other.end_lease()
        last = await other.put("x", {})
        await ask(etcd, "/v3/kv/compaction", {"revision": str(last)})
        await proxy.open()
        first = await within(PATIENCE, waiting)
        assert (first.key, first.item.value) == ("m/stays", {"n": 3})
        gone = await next_of(changes)
        assert (gone.key, gone.item) == ("m/goes", None)
        await other.put("m/stays", {"n": 4})
        assert (await next_of(changes)).item.value == {"n": 4}
        await changes.aclose()


@pytest.mark.needs("etcd", "ipv6")
@story
async def test_an_address_of_ipv6(run_id):
    with running(*FAST, also_at=["[::1]"]) as etcd:
        clock = SystemClock()
        store = await open_store(f"[::1]:{etcd.port}", run_id, {}, timeout=9.0, clock=clock)
        await store.put("a", {})
        assert store.local_addr == "::1"
        await close_store(store)


# --- what else may be at the endpoint ------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nNot Found",
        b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"hello": "you"}',
    ],
)
@story
async def test_etcd_client_refuses_a_server_that_is_not_etcd(run_id, answer):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RendezvousRefused, match=r"is not etcd 3.4 or later without TLS"):
            await within(PATIENCE, EtcdStore.connect([("127.0.0.1", port)], run_id, timeout=9))


@story
async def test_etcd_connect_where_nothing_listens_times_out_with_a_reason(run_id):
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
    with pytest.raises(RendezvousLost, match=r"No etcd answered at .* \(connection refused\)"):
        await within(PATIENCE, EtcdStore.connect([("127.0.0.1", port)], run_id, timeout=0.2))


# --- one job after another -----------------------------------------------------------------------


async def closed_world(store):
    await store.put("world", {"phase": "closed"})


@story
async def test_the_last_to_go_clears_a_closed_job_away(etcd, run_id):
    async with connected(etcd.port, run_id) as one, connected(etcd.port, run_id) as other:
        for store in (one, other):
            await store.open_lease(60.0)
            await store.put(f"member/{id(store)}", {}, leased=True)
        await closed_world(one)
        await one.end_lease()
        assert not await remove_if_finished(one)
        assert "world" in (await other.get("")).items
        await close_store(other)
        assert not await asyncio.to_thread(etcd.keys_of, run_id)


@story
async def test_a_job_that_is_not_closed_is_left_as_it_is(etcd, run_id):
    async with connected(etcd.port, run_id) as store:
        await store.put("world", {"phase": "running"})
        assert not await remove_if_finished(store)
        await within(PATIENCE, remove_closed_job(store, 1.0))
        assert list((await store.get("")).items) == ["world"]


@story
async def test_the_next_job_waits_for_the_nodes_of_the_last(etcd, run_id):
    async with connected(etcd.port, run_id) as old:
        await old.open_lease(60.0)
        await old.put("member/1", {}, leased=True)
        await closed_world(old)
        opening = asyncio.ensure_future(
            open_store(etcd.endpoint, run_id, {}, timeout=9.0, clock=SystemClock())
        )
        with pytest.raises(asyncio.TimeoutError):
            await within(0.3, asyncio.shield(opening))
        await old.end_lease()
        new = await within(PATIENCE, opening)
        assert (await new.get("")).items == {}
        await close_store(new)


@story
async def test_nodes_of_a_closed_job_that_do_not_go_are_named_as_the_reason(etcd, run_id):
    async with connected(etcd.port, run_id) as old:
        await old.open_lease(60.0)
        await old.put("member/1", {}, leased=True)
        await closed_world(old)
        with pytest.raises(RendezvousRefused, match=r"are still running after 0\.2 s"):
            await open_store(etcd.endpoint, run_id, {}, timeout=0.2, clock=SystemClock())


@story
async def test_node_away_at_the_end_of_its_job_leaves_the_next_job_alone(etcd, run_id):
    clock = FakeClock()
    async with (
        connected(etcd.port, run_id, clock=clock, settings=SHORT) as away,
        connected(etcd.port, run_id) as last,
        connected(etcd.port, run_id) as new,
    ):
        await away.open_lease(0.9)
        await away.put("member/away", {}, leased=True)
        clock.advance(0.9)  # as after a stop of the process
        await within(PATIENCE, away.lease_lost.wait())
        await closed_world(last)
        # Waits until etcd, too, has given up the one that is away.
        await within(PATIENCE, remove_closed_job(last, None))
        # Who has said nothing yet is simply of the next job.
        await new.put("world", {"phase": "running"})
        await away.open_lease(60.0)
        for verb in (away.put("member/away", {}, leased=True), away.get("")):
            with pytest.raises(RendezvousLost, match="ended while this node was disconnected"):
                await verb
        assert list((await new.get("")).items) == ["world"]


@pytest.mark.parametrize("has_written", [True, False])
@story
async def test_a_watch_tells_nothing_of_the_next_job_of_the_same_id(etcd, run_id, has_written):
    async with (
        connected(etcd.port, run_id) as watcher,
        connected(etcd.port, run_id) as last,
        connected(etcd.port, run_id) as new,
    ):
        await last.put("a", {"n": 1})
        if has_written:
            await watcher.put("mine", {})
            await watcher.compare_and_set("b", {}, expected=0)
        changes = watcher.watch("a", after=0)
        assert (await next_of(changes)).item.value == {"n": 1}
        assert await last.forget_job("a", (await last.get("a")).items["a"].modified, "b", "mine")
        assert (await next_of(changes)).item is None
        await new.put("a", {"n": 2})
        if has_written:
            with pytest.raises(RendezvousLost, match="ended while this node was disconnected"):
                await next_of(changes)
        else:
            # It has said nothing yet, and so is simply of the next job.
            assert (await next_of(changes)).item.value == {"n": 2}
        await changes.aclose()


@story
async def test_a_watch_from_the_beginning_begins_with_the_job(etcd, run_id):
    async with connected(etcd.port, run_id) as last:
        await last.put("a", {"n": 1})
        assert await last.forget_job("a", (await last.get("a")).items["a"].modified)
    async with connected(etcd.port, run_id) as new:
        await new.put("a", {"n": 2})
        changes = new.watch("", after=0)
        assert (await next_of(changes)).item.value == {"n": 2}
        await changes.aclose()


@story
async def test_a_change_that_etcd_would_not_take_is_refused_with_a_reason(etcd, run_id):
    async with connected(etcd.port, run_id) as store:
        parts = {f"part/{n}": {} for n in range(127)}
        assert await store.compare_and_set("world", {}, expected=0, beside=parts)
        with pytest.raises(WireError, match="of 129 keys at once is too large"):
            await store.compare_and_set("world", {}, expected=0, beside={**parts, "part/127": {}})


@story
async def test_a_lease_outlives_an_outage_longer_than_itself(etcd, run_id):
    async with (
        proxied(etcd.port) as proxy,
        connected(proxy.port, run_id) as store,
        connected(etcd.port, run_id) as other,
    ):
        await store.open_lease(1.0)
        await store.put("member/1", {}, leased=True)
        await proxy.shut()
        with pytest.raises(asyncio.TimeoutError):
            await within(2.0, store.lease_lost.wait())
        await proxy.open()
        assert await within(PATIENCE, store.keep_alive())
        assert "member/1" in (await other.get("")).items


@story
async def test_frozen_node_has_lost_its_lease_though_etcd_keeps_it(etcd, run_id):
    clock = FakeClock()
    async with (
        connected(etcd.port, run_id, clock=clock) as frozen,
        connected(etcd.port, run_id) as other,
    ):
        await frozen.open_lease(3.0)
        await frozen.put("member/1", {}, leased=True)
        clock.advance(3.0)
        with pytest.raises(LeaseExpired):
            await frozen.put("member/1", {}, leased=True)
        assert frozen.lease_lost.is_set()
        assert "member/1" in (await other.get("")).items


# --- a cluster of servers -------------------------------------------------------------------------


def among(servers: list[Etcd], run_id: str, **options):
    return opened([server.address for server in servers], run_id, **options)


def leader_first(members: list[Etcd]) -> list[Etcd]:
    leader = poll_for(lambda: [m for m in members if m.leads()], what="a leader")[0]
    return [leader, *(member for member in members if member is not leader)]


def test_the_leader_of_a_cluster_may_go(run_id, caplog):
    caplog.set_level(logging.INFO)

    async def story(members):
        async with among(members, run_id) as store, among(members[1:], run_id) as other:
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
        async with among(followers, run_id) as store, among(members, run_id) as other:
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
        async with among([alone, healthy], run_id) as store:
            assert store._pool.address.port == healthy.port
            await store.put("a", {})

    with cluster(3, *FAST) as members, running(*FAST) as healthy:
        for member in members[1:]:
            member.stop()
        poll_for(lambda: not members[0].answers(), what="it notices that it is alone")
        asyncio.run(story(members[0], healthy))


def test_a_watch_ends_at_a_server_that_lost_its_leader_and_goes_on_when_there_is_one(run_id):
    async def story(members):
        async with among(members[:1], run_id) as store:
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
        async with among([etcd], run_id, settings=settings) as store:
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
        async with among([etcd], run_id, settings=settings) as store:
            await a_whole_story(store)

    with running(*FAST) as etcd:
        asyncio.run(story(etcd))
    assert "is ignored" in caplog.text
    assert PASSWORD not in caplog.text
