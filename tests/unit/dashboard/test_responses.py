"""Responses: who is admitted, and what is served."""

import re
from pathlib import Path

import torchelastic
from tests.unit.cli.tables import wrong
from torchelastic.dashboard import responses
from torchelastic.dashboard.access import AccessControl
from torchelastic.dashboard.job_state import JobState
from torchelastic.dashboard.responses import FIELDS, Reply, answer
from torchelastic.transport import http
from torchelastic.transport.http import Request

TOKEN = b"0123456789abcdef"
FILES = {
    "/": responses.StaticFile("text/html; charset=utf-8", b"<!doctype html>"),
    "/static/page.js": responses.StaticFile("text/javascript; charset=utf-8", b"1"),
}
HERE = {"host": "localhost:29480"}


def asked(path="/", method="GET", query="", **fields):
    return Request(method, path, query, HERE | fields)


def got(request, door=None):
    return answer(request, door or AccessControl(None), FILES)


def status(request, door=None):
    found = got(request, door)
    return found.status if isinstance(found, Reply) else found


CASES = [
    (None, 400),
    (asked("/"), 200),
    (asked("/", "HEAD"), 200),
    (asked("/", query="x=1"), 200),
    (asked("/static/page.js"), 200),
    (asked("/picture.json"), "state"),
    (asked("/events"), "stream"),
    (asked("/index.html"), 404),
    (asked("/static/"), 404),
    (asked("/static/../page.js"), 404),
    (asked("/static/%2e%2e/server.py"), 404),
    (asked("/static/page.js/"), 404),
    (asked("//static/page.js"), 404),
    (asked("/etc/passwd"), 404),
    (asked("http://localhost/"), 404),
    (asked("*", "OPTIONS"), 405),
    (asked("/", "POST"), 405),
    (asked("/picture.json", "DELETE"), 405),
    (asked("/events", "POST"), 405),
    (asked("/", host="evil.example"), 403),
    (asked("/events", host="evil.example"), 403),
    (Request("GET", "/"), 403),
    (asked("/", **{"sec-fetch-site": "cross-site"}), 200),
    (asked("/events", **{"sec-fetch-site": "cross-site"}), 403),
    (asked("/picture.json", **{"sec-fetch-site": "same-origin"}), "state"),
]


def test_answer_serves_known_paths_only():
    assert wrong(status, CASES) == []


def test_answer_without_token_reveals_nothing():
    door, bearer = AccessControl(TOKEN), {"authorization": "Bearer 0123456789abcdef"}
    for path in ("/", "/static/page.js", "/events", "/picture.json", "/no/such/thing"):
        assert got(asked(path), door) == responses.refusal(401), path
        assert got(asked(path, "POST"), door) == responses.refusal(401), path
        assert status(asked(path, **bearer), door) != 401, path


def test_the_token_becomes_a_cookie_and_leaves_the_address():
    door = AccessControl(TOKEN)
    welcome = got(asked("/", query=door.query()[1:]), door)
    assert welcome.status == 200
    assert welcome.fields == {"Set-Cookie": door.cookie(), "Refresh": "0; url=/"}
    assert TOKEN not in welcome.to_bytes()
    cookie = door.cookie().partition(";")[0]
    assert status(asked("/", cookie=cookie), door) == 200
    assert status(asked("/events", cookie=cookie), door) == "stream"
    query = door.query()[1:]  # is not taken in another address
    for request in (asked("/picture.json", query=query), asked("/", "POST", query=query)):
        assert status(request, door) == 404


def test_every_answer_keeps_the_page_to_itself_and_lets_nothing_in_from_elsewhere():
    for code in (400, 401, 403, 404, 405, 503):
        head, _, body = responses.refusal(code).to_bytes().partition(b"\r\n\r\n")
        for name, value in FIELDS.items():
            assert head.count(f"\r\n{name}: {value}".encode()) == 1
        assert b"Content-Type: text/plain" in head
        assert body.endswith(b".\n")
    policy = FIELDS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert b"Content-Security-Policy: default-src 'none'" in got(asked("/")).to_bytes()
    assert b"Content-Security-Policy: default-src 'none'" in responses.stream_head(packed=True)


def test_nothing_of_a_request_comes_back():
    for text in (
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "a\r\nSet-Cookie: x=1",
        "<html>",
        "\x00\x1b[2J\u2028",
    ):
        raw = text.encode()
        head = b"GET /" + raw + b"?token=" + raw + b" HTTP/1.1\r\nHost: " + raw
        for door in (AccessControl(None), AccessControl(TOKEN)):
            sent = got(http.parse(head), door)
            assert sent.status in (400, 401, 403), text
            assert sent.to_bytes() == responses.refusal(sent.status).to_bytes(), text


def test_stream_is_gzipped_if_the_client_accepts_it():
    for accepts, packed in {
        "gzip, deflate, br": True,
        "br;q=1, gzip;q=0.5": True,
        "": False,
        "identity": False,
        "xgzip": False,
    }.items():
        assert responses.takes_gzip(asked(**{"accept-encoding": accepts})) is packed, accepts
    for packed in (True, False):
        assert (b"Content-Encoding: gzip" in responses.stream_head(packed=packed)) is packed


def test_a_picture_that_could_not_be_made_is_reported():
    assert responses.state(None).status == 503
    made = responses.state(JobState.of(1, {"a": 1}, live=True))
    assert (made.status, made.body, made.content_type) == (200, b'{"a":1}', "application/json")


# --- access control ------------------------------------------------------------------------------


def visit(query="", **fields):
    return Request("GET", "/", query, fields)


def test_without_a_token_whoever_calls_this_machine_by_its_name_is_let_in():
    door = AccessControl(None)
    assert door.judge(visit(host="localhost:29480")) == "in"
    assert door.judge(visit(host="evil.example")) == "wrong host"
    assert door.judge(visit()) == "wrong host"
    assert door.query() == ""


ADMITTED = [
    (visit(), "no token"),
    (visit(host="localhost"), "no token"),
    (visit("token=0123456789abcdef"), "has token"),
    (visit("x=1&token=0123456789abcdef"), "has token"),
    (visit("token=0123456789abcdeX"), "no token"),
    (visit("token="), "no token"),
    (visit("token"), "no token"),
    (visit("token=%ff%00%E2%80%A8"), "no token"),
    (visit("token=\u2028"), "no token"),
    (visit(authorization="Bearer 0123456789abcdef"), "in"),
    (visit(authorization="Bearer wrong"), "no token"),
    (visit(cookie="0123456789abcdef"), "no token"),
    (visit(cookie="torchelastic=0123456789abcdef"), "no token"),
    (visit("Token=0123456789abcdef"), "no token"),
]


def test_with_a_token_whoever_shows_it_is_let_in_by_any_name():
    assert wrong(AccessControl(TOKEN).judge, ADMITTED) == []


def test_the_cookie_lets_in_and_does_not_tell_the_token():
    door = AccessControl(TOKEN)
    pair, *marks = door.cookie().split("; ")
    assert TOKEN.decode() not in pair
    assert set(marks) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert door.judge(visit(cookie=pair)) == "in"
    assert door.judge(visit(cookie=f"a=b; {pair}; c=d")) == "in"
    assert door.judge(visit(cookie=pair[:-1])) == "no token"
    assert door.judge(visit(cookie=pair.partition("=")[0] + "=")) == "no token"
    other = AccessControl(TOKEN[::-1]).cookie()  # of another job
    assert other.partition("=")[0] != pair.partition("=")[0]
    assert door.judge(visit(cookie=other)) == "no token"


def test_an_address_can_show_any_token():
    for token in (TOKEN, b"/?&=#%+ \xff\n0123456789", "é".encode() * 8):
        query = AccessControl(token).query()
        assert query.startswith("?token=")
        assert query.isascii()
        assert not set(query[7:]) & set("/?&=# \n")
        assert AccessControl(token).judge(visit(query[1:])) == "has token"


# --- the files of the page -----------------------------------------------------------------------


STATIC = Path(torchelastic.__file__).parent / "dashboard" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
#: What makes markup or code of a text, or a style that the policy of the page forbids.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\(|new Function|"
    r"setHTML|createContextualFragment|srcdoc|\bstyle:|\.style\b|javascript:"
)


def test_a_script_is_small_and_makes_no_markup():
    for path in SCRIPTS:
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path.name
        assert max(map(len, text.splitlines())) <= 100, path.name
        assert FORBIDDEN.findall(text) == [], path.name


def test_page_loads_only_its_own_existing_files():
    html = (STATIC / "index.html").read_text()
    asked = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert all((STATIC.parent / path).is_file() for path in asked)
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=", html)
    assert not re.search(r"https?://(?!www\.w3\.org)", html)
    for path in SCRIPTS:
        for name in re.findall(r'from "([^"]+)"', path.read_text()):
            assert (STATIC / name).is_file(), f"{path.name}: {name}"
    assert not re.search(r"url\(|@import", (STATIC / "style.css").read_text())


def test_everything_in_the_directory_is_served_and_installed():
    found = responses.load_files()
    assert found["/"].content_type == "text/html; charset=utf-8"
    assert found["/"].body.lstrip().lower().startswith(b"<!doctype html>")
    paths = {f"/static/{path.name}" for path in STATIC.iterdir()} - {"/static/index.html"}
    assert set(found) == paths | {"/"}
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert re.search(r'^torchelastic = \[.*"dashboard/static/\*".*\]$', project, re.MULTILINE)
