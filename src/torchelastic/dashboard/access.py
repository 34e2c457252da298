"""Who may look at the page. Pure.

Without a token whoever reaches this machine's loopback address may. A web page of a stranger's, in
the browser of somebody here, reaches it as well, by a name of its own that leads to 127.0.0.1: so
the name by which we are called has to be the loopback's.
With a token, whoever shows it: in the address once, from then on in a cookie, or as `Bearer`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Literal
from urllib.parse import parse_qs, quote

from torchelastic.transport.http import Request, bears, is_loopback, same

Verdict = Literal["in", "has token", "no token", "wrong host"]

#: What the cookie is made from, besides the token.
_COOKIE = b"torchelastic dashboard"


class Door:
    """Lets in whoever has the token; None: whoever is on this machine."""

    def __init__(self, token: bytes | None) -> None:
        self._token = token
        if token is not None:
            # The cookie says the token without telling it, and in letters that a cookie may have.
            # Its name is of the token: cookies of other ports of this machine are sent here, too.
            mark = hmac.new(token, _COOKIE, hashlib.sha256).hexdigest()
            self._name, self._mark = f"torchelastic-{mark[:8]}", mark[8:]

    def judge(self, request: Request) -> Verdict:
        """Whether this request may come in, and if not, why."""
        if self._token is None:
            return "in" if is_loopback(request.get("host")) else "wrong host"
        if bears(request.get("authorization"), self._token) or self._has_cookie(request):
            return "in"
        given = parse_qs(request.query, encoding="latin-1").get("token", [""])[0]
        return "has token" if same(given, self._token) else "no token"

    def cookie(self) -> str:
        """For who has shown the token."""
        return f"{self._name}={self._mark}; Path=/; HttpOnly; SameSite=Strict"

    def query(self) -> str:
        """What an address needs to show the token."""
        return f"?token={quote(self._token, safe='')}" if self._token is not None else ""

    def _has_cookie(self, request: Request) -> bool:
        for pair in re.split("[;,]", request.get("cookie")):
            name, _, value = pair.strip().partition("=")
            if name == self._name and same(value, self._mark.encode()):
                return True
        return False
