"""Access control of the page. Pure.

Without a token, any client of this machine's loopback address may see the page. A malicious website
in a local browser could reach it under its own name that resolves to 127.0.0.1 (DNS rebinding), so
the Host header must be a loopback name.
With a token, any client that presents it: once in the address, then in a cookie, or as `Bearer`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Literal
from urllib.parse import parse_qs, quote

from torchelastic.transport.http import Request, bears, is_loopback, same

Access = Literal["in", "has token", "no token", "wrong host"]

#: Hashed with the token to make the cookie.
_COOKIE = b"torchelastic dashboard"


class AccessControl:
    """Admits clients with the token; without a token, clients on this machine."""

    def __init__(self, token: bytes | None) -> None:
        self._token = token
        if token is not None:
            # A hash proves the token without revealing it, in characters that cookies allow. The
            # name depends on it too: browsers also send the cookies of other ports of this machine.
            mark = hmac.new(token, _COOKIE, hashlib.sha256).hexdigest()
            self._name, self._mark = f"torchelastic-{mark[:8]}", mark[8:]

    def judge(self, request: Request) -> Access:
        """Return `in` if the request is admitted, or else why not."""
        if self._token is None:
            return "in" if is_loopback(request.get("host")) else "wrong host"
        if bears(request.get("authorization"), self._token) or self._has_cookie(request):
            return "in"
        given = parse_qs(request.query, encoding="latin-1").get("token", [""])[0]
        return "has token" if same(given, self._token) else "no token"

    def cookie(self) -> str:
        """Return the cookie for a client that presented the token."""
        return f"{self._name}={self._mark}; Path=/; HttpOnly; SameSite=Strict"

    def query(self) -> str:
        """Return the query string that presents the token."""
        return f"?token={quote(self._token, safe='')}" if self._token is not None else ""

    def _has_cookie(self, request: Request) -> bool:
        for pair in re.split("[;,]", request.get("cookie")):
            name, _, value = pair.strip().partition("=")
            if name == self._name and same(value, self._mark.encode()):
                return True
        return False
