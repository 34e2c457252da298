"""The store at etcd: messages, settings, connections."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
from types import SimpleNamespace

import pytest

from tests.support import FakeClock
from tests.unit.rendezvous.cast import story
from torchelastic.errors import ConfigError, WireError
from torchelastic.rendezvous.etcd import connection_pool, etcd_messages
from torchelastic.rendezvous.etcd.connection_pool import client_context
from torchelastic.rendezvous.etcd.etcd_messages import EtcdBusy, EtcdRefused, JobKeys
from torchelastic.rendezvous.etcd.etcd_store import WatchEvents
from torchelastic.rendezvous.etcd.settings import EtcdSettings, Login, TlsFiles
from torchelastic.rendezvous.store import Change, Item, Listing

# --- etcd messages --------------------------------------------------------------------------------

KEYS = JobKeys.of("job", "/torchelastic")


def b64(text):
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("job", "prefix", "root"),
    [
        ("job", "/torchelastic", "/torchelastic/job/"),
        ("job", "torchelastic/p2p/", "/torchelastic/p2p/job/"),
        ("a/b", "/x", "/x/a%2Fb/"),
        ("é %", "/x", "/x/%C3%A9%20%25/"),
    ],
)
def test_etcd_keys_of_a_job_have_its_prefix(job, prefix, root):
    keys = JobKeys.of(job, prefix)
    assert (keys.root, keys.job) == (root, f"{root}job")
    assert keys.full("member/1") == f"{root}keys/member/1"
    assert keys.short(keys.full("member/1")) == "member/1"


def test_a_range_ends_before_the_first_key_that_begins_otherwise():
    assert etcd_messages.key_range("a/") == {"key": b64("a/"), "range_end": b64("a0")}


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (200, b"", WireError, "not from etcd"),
        (200, b"[1]", WireError, "not from etcd"),
        (200, b"{}", WireError, "no header"),
        (200, b'{"result": 3}', WireError, "no header"),
        (404, b"Not Found", WireError, "HTTP status 404"),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", WireError, "HTTP status 400"),
        (503, b"<html>", EtcdBusy, "HTTP status 503"),
        (500, b'{"message": "odd"}', EtcdBusy, "odd"),
        (503, b'{"error": "no leader", "code": 14}', EtcdBusy, "no leader"),
        (200, b'{"error": {"grpc_code": 1, "message": "closing"}}', EtcdBusy, "closing"),
        (
            404,
            b'{"error": "e", "message": "lease not found", "code": 5}',
            EtcdRefused,
            "lease not fo",
        ),
        (
            401,
            b'{"code": 16, "message": "invalid auth token", "details": []}',
            EtcdRefused,
            "token",
        ),
    ],
)
def test_answers_that_are_none(status, body, error, words):
    with pytest.raises(error, match=words):
        etcd_messages.read(status, body)


def test_streams_wrap_what_others_tell_plainly():
    plain = {"header": {"revision": "7"}, "TTL": "3"}
    for body in (plain, {"result": plain}):
        answer = etcd_messages.read(200, json.dumps(body).encode())
        assert etcd_messages.revision(answer) == 7
        assert etcd_messages.time_to_live(answer) == 3


def row(key, value, created, modified):
    stored = etcd_messages.encode_value(value, stamp="s", job=1).decode()
    return {
        "key": b64(KEYS.full(key)),
        "value": b64(stored),
        "create_revision": str(created),
        "mod_revision": str(modified),
    }


def test_rows_and_changes_are_reported_in_our_callers_words():
    answer = {"header": {"revision": "9"}}
    response = {"response_range": {"kvs": [row("a", {"n": 1}, 2, 5)]}}
    assert etcd_messages.listing(answer, response, KEYS) == Listing(9, {"a": Item({"n": 1}, 2, 5)})
    gone = {"type": "DELETE", "kv": {"key": b64(KEYS.full("b")), "mod_revision": "6"}}
    events = {"events": [{"kv": row("a", {}, 2, 5)}, gone]}
    assert etcd_messages.changes(events, KEYS) == [
        Change("a", Item({}, 2, 5), 5),
        Change("b", None, 6),
    ]


@pytest.mark.parametrize("value", [b64("hello"), b64("[]"), b64("{}"), b64("3"), "", "no base64"])
def test_etcd_foreign_value_is_refused_by_key(value):
    response = {"kvs": [{"key": b64(KEYS.full("a")), "value": value}]}
    with pytest.raises(WireError):
        etcd_messages.listing({"header": {}}, response, KEYS)


def test_a_value_too_large_for_etcd_is_refused_before_it_is_sent():
    half = {"x": "y" * (etcd_messages.VALUE_LIMIT // 2)}
    for values, sentence in (
        (
            {"world": {"x": "y" * etcd_messages.VALUE_LIMIT}},
            "'world' takes .* bytes; etcd is given",
        ),
        ({"world": half, "part/0": half}, "'part/0' and 1 more take .* bytes"),
        ({str(n): {} for n in range(129)}, "of 129 keys at once is too large: .* 128"),
    ):
        with pytest.raises(WireError, match=sentence):
            etcd_messages.puts(KEYS, values, {}, stamp="s", job=1)
    assert (
        len(etcd_messages.puts(KEYS, {str(n): {} for n in range(128)}, {}, stamp="s", job=1)) == 128
    )


def test_etcd_keys_of_an_earlier_job_with_this_id_are_recognized():
    def event(job, **more):
        value = etcd_messages.encode_value({"n": 1}, stamp="s", job=job)
        return {"kv": {"key": b64(KEYS.full("a")), "value": b64(value.decode())}, **more}

    def foreign(*events):
        return etcd_messages.is_of_another_job({"events": list(events)}, 7)

    assert not foreign()
    assert not foreign(event(7), {"kv": {"key": b64(KEYS.full("a"))}, "type": "DELETE"})
    assert foreign(event(7), event(9))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"canceled": True, "cancel_reason": "no leader"}, "no leader"),
        ({"canceled": True}, "ended the watch"),
        ({"canceled": True, "compact_revision": "3"}, None),
        ({"created": True}, None),
    ],
)
def test_a_watch_that_etcd_ends(message, reason):
    if reason is None:
        etcd_messages.check_watch(message)
    else:
        with pytest.raises(EtcdBusy, match=reason):
            etcd_messages.check_watch(message)


def test_etcd_login_token_goes_into_a_header():
    assert etcd_messages.token({"token": "a.1"}) == "a.1"
    for bad in ({}, {"token": ""}, {"token": "a\r\nX: y"}, {"token": 3}, {"token": "é"}):
        with pytest.raises(WireError, match="no token"):
            etcd_messages.token(bad)


@pytest.mark.parametrize(
    ("code", "message", "over"),
    [
        (16, "etcdserver: invalid auth token", True),
        (3, "etcdserver: revision of auth store is old", True),
        (7, "etcdserver: permission denied", False),
        (3, "etcdserver: user name is empty", False),
    ],
)
def test_etcd_expired_login_is_repeated(code, message, over):
    assert etcd_messages.is_login_over(EtcdRefused(code, message)) is over


def test_etcd_refusals_say_what_to_do():
    assert "etcd_password_file" in str(EtcdRefused(3, "etcdserver: user name is empty"))
    assert str(EtcdRefused(3, "odd")) == "etcd refused the request: odd."
    with pytest.raises(EtcdRefused, match=r"request: a\?b\."):
        etcd_messages.read(400, b'{"message": "a\\nb", "code": 3}')


# --- feeds ---------------------------------------------------------------------------------------


def put(key, revision):
    return Change(key, Item({}, revision, revision), revision)


def test_a_feed_tells_each_change_once():
    feed = WatchEvents("", 3, ())
    assert feed.take([put("a", 3), put("a", 4)]) == [put("a", 4)]
    # A lease that ends takes several keys at one revision.
    both = [Change("a", None, 6), Change("b", None, 6)]
    assert feed.take([put("a", 4), *both]) == both
    assert feed.take(both) == []


def test_after_a_compaction_nothing_is_left_out():
    feed = WatchEvents("m/", 3, ("m/told", "m/kept", "other"))
    feed.take([put("m/new", 5), put("m/short", 6), Change("m/short", None, 7)])
    listing = Listing(20, {"m/late": Item({}, 12, 15), "m/kept": Item({}, 2, 9)})
    assert feed.catch_up(listing) == [
        Change("m/kept", Item({}, 2, 9), 9),
        Change("m/late", Item({}, 12, 15), 15),
        Change("m/new", None, 20),
        Change("m/told", None, 20),
    ]
    assert feed.take([put("m/late", 15), put("m/late", 21)]) == [put("m/late", 21)]


def test_a_listing_tells_nothing_that_was_reported():
    feed = WatchEvents("", 9, ("a",))
    assert feed.catch_up(Listing(12, {"a": Item({}, 2, 9)})) == []


# --- settings -------------------------------------------------------------------------------------

# What is said about etcd, and what is wrong with it.


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "password"
    path.write_text("hunter2\n")
    return path


@pytest.mark.parametrize(
    ("conf", "settings"),
    [
        ({}, EtcdSettings()),
        ({"timeout": 5, "etcd_prefix": None, "cacert": ""}, EtcdSettings()),
        ({"etcd_prefix": "jobs"}, EtcdSettings(prefix="/jobs")),
        ({"etcd_outage": "2.5"}, EtcdSettings(outage=2.5)),
        ({"protocol": "https"}, EtcdSettings(tls=TlsFiles())),
        ({"cacert": "ca"}, EtcdSettings(tls=TlsFiles(cacert="ca"))),
        ({"cert": "c", "key": "k"}, EtcdSettings(tls=TlsFiles(cert="c", key="k"))),
    ],
)
def test_etcd_settings_read_all_keys(conf, settings):
    assert EtcdSettings.of(conf) == settings


@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        ({"etcd_prefix": "//"}, "must be a key"),
        ({"etcd_outage": "soon"}, "not a valid time"),
        ({"etcd_outage": "-1"}, "not a valid time"),
        ({"protocol": "ftp"}, "use http or https"),
        ({"protocol": "http", "cacert": "ca"}, "cacert cannot be used"),
        ({"key": "k"}, "cert=FILE"),
        ({"etcd_user": "me"}, "both etcd_user and etcd_password_file"),
        ({"etcd_password_file": "x"}, "both etcd_user and etcd_password_file"),
        ({"etcd_user": "me", "etcd_password_file": "/nowhere"}, "No such file"),
    ],
)
def test_etcd_invalid_setting_is_reported(conf, sentence):
    with pytest.raises(ConfigError, match=sentence):
        EtcdSettings.of(conf)


def test_a_password_is_read_from_a_file_and_never_shown(password_file):
    settings = EtcdSettings.of({"etcd_user": "me", "etcd_password_file": str(password_file)})
    assert settings.login == Login("me", "hunter2")
    assert "hunter2" not in f"{settings} {settings!r} {settings.login}"


def test_user_and_password_may_come_from_the_environment(password_file, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ETCD_USER", "env")
    monkeypatch.setenv("TORCHELASTIC_ETCD_PASSWORD_FILE", str(password_file))
    assert EtcdSettings.of({}).login == Login("env", "hunter2")
    assert EtcdSettings.of({"etcd_user": "me"}).login == Login("me", "hunter2")


@pytest.mark.parametrize("content", [b"", b"two\nlines", b"x" * 5000, b"\xff\xfe"])
def test_a_file_that_has_no_password(password_file, content):
    password_file.write_bytes(content)
    with pytest.raises(ConfigError, match="etcd_password_file"):
        EtcdSettings.of({"etcd_user": "me", "etcd_password_file": str(password_file)})


@pytest.mark.parametrize("name", ["cacert", "cert"])
def test_files_that_are_no_certificates(tmp_path, name):
    junk = tmp_path / "junk.pem"
    junk.write_text("hello")
    for path in (junk, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=rf"Cannot use {name}="):
            client_context(TlsFiles(**{name: str(path)}))


# --- connection pool ------------------------------------------------------------------------------

# How long etcd is waited for, and what is said meanwhile.


@story
async def test_etcd_out_of_reach_is_reported_every_minute(monkeypatch, caplog):
    monkeypatch.setattr(connection_pool, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(connection_pool, "LONGEST_PAUSE", 0.0)
    etcd = SimpleNamespace(
        addresses=["etcd1:2379"],
        check=lambda: None,
        lost=asyncio.get_running_loop().create_future(),
        has_tls=False,
    )
    clock = FakeClock()
    patience = connection_pool.RetryLimit(etcd, 3600.0, clock, first=True)
    with caplog.at_level(logging.WARNING, logger=connection_pool.log.name):
        for trouble in (socket.gaierror(), *[ConnectionRefusedError()] * 3):
            await patience.wait(trouble)
            clock.advance(connection_pool.REPEAT_INTERVAL / 2)
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert said == ["host name not known", "connection refused"]
