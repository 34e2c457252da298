"""Who may look at the page."""

from tests.unit.cli.tables import wrong
from torchelastic.dashboard.access import AccessControl
from torchelastic.transport.http import Request

TOKEN = b"0123456789abcdef"


def asked(query="", **fields):
    return Request("GET", "/", query, fields)


def test_without_a_token_whoever_calls_this_machine_by_its_name_is_let_in():
    door = AccessControl(None)
    assert door.judge(asked(host="localhost:29480")) == "in"
    assert door.judge(asked(host="evil.example")) == "wrong host"
    assert door.judge(asked()) == "wrong host"
    assert door.query() == ""


CASES = [
    (asked(), "no token"),
    (asked(host="localhost"), "no token"),
    (asked("token=0123456789abcdef"), "has token"),
    (asked("x=1&token=0123456789abcdef"), "has token"),
    (asked("token=0123456789abcdeX"), "no token"),
    (asked("token="), "no token"),
    (asked("token"), "no token"),
    (asked("token=%ff%00%E2%80%A8"), "no token"),
    (asked("token=\u2028"), "no token"),
    (asked(authorization="Bearer 0123456789abcdef"), "in"),
    (asked(authorization="Bearer wrong"), "no token"),
    (asked(cookie="0123456789abcdef"), "no token"),
    (asked(cookie="torchelastic=0123456789abcdef"), "no token"),
    (asked("Token=0123456789abcdef"), "no token"),
]


def test_with_a_token_whoever_shows_it_is_let_in_by_any_name():
    assert wrong(AccessControl(TOKEN).judge, CASES) == []


def test_the_cookie_lets_in_and_does_not_tell_the_token():
    door = AccessControl(TOKEN)
    pair, *marks = door.cookie().split("; ")
    assert TOKEN.decode() not in pair
    assert set(marks) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert door.judge(asked(cookie=pair)) == "in"
    assert door.judge(asked(cookie=f"a=b; {pair}; c=d")) == "in"
    assert door.judge(asked(cookie=pair[:-1])) == "no token"
    assert door.judge(asked(cookie=pair.partition("=")[0] + "=")) == "no token"
    other = AccessControl(TOKEN[::-1]).cookie()  # of another job
    assert other.partition("=")[0] != pair.partition("=")[0]
    assert door.judge(asked(cookie=other)) == "no token"


def test_an_address_can_show_any_token():
    for token in (TOKEN, b"/?&=#%+ \xff\n0123456789", "é".encode() * 8):
        query = AccessControl(token).query()
        assert query.startswith("?token=")
        assert query.isascii()
        assert not set(query[7:]) & set("/?&=# \n")
        assert AccessControl(token).judge(asked(query[1:])) == "has token"
