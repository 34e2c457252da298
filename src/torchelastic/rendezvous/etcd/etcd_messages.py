"""etcd's requests and answers, in the JSON form of its v3 API. Pure.

In that form bytes are base64, 64-bit numbers are strings, and zero, false and empty values are left
out. Every write is one transaction, on condition that the job is still the one we joined and that
the key is unchanged. Each write has a stamp: sent twice, it is performed once.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from torchelastic.errors import RendezvousRefused, WireError
from torchelastic.rendezvous.store import Change, Item, Json, Listing
from torchelastic.system.text import printable

RANGE, TXN = "/v3/kv/range", "/v3/kv/txn"
GRANT, KEEP_ALIVE, REVOKE = "/v3/lease/grant", "/v3/lease/keepalive", "/v3/lease/revoke"
WATCH = "/v3/watch"
AUTHENTICATE = "/v3/auth/authenticate"

#: The most bytes of values in one change; etcd's own limit for a request is 1.5 MB.
VALUE_LIMIT = 1024 * 1024
#: The most keys in one change with etcd's default settings.
KEYS_LIMIT = 128

# Codes of gRPC.
NOT_FOUND = 5
#: The code for a lease granted twice, and for a login where authentication is off.
FAILED_PRECONDITION = 9
_UNAUTHENTICATED = 16
#: Temporary errors: cancelled, deadline, exhausted, aborted, unavailable.
_TEMPORARY = {1, 4, 8, 10, 14}


#: Advice for some of etcd's error messages.
_ADVICE = {
    "etcdserver: user name is empty": "name a user, with etcd_user and etcd_password_file",
    "etcdserver: permission denied": "the user needs a role that writes under etcd_prefix",
}


#: The gateway's message for certificates that could be taken for a login.
_COMMON_NAME = b"CommonName of client sending a request against gateway"


class EtcdBusy(Exception):
    """etcd, or a proxy in front of it, cannot answer now."""


class EtcdRefused(RendezvousRefused):
    """etcd refused a request; a retry would not help."""

    def __init__(self, code: int, message: str) -> None:
        hint = _ADVICE.get(message, "")
        super().__init__(f"etcd refused the request: {message}{hint and f': {hint}'}.")
        self.code = code
        self.message = message


# --- where the keys are --------------------------------------------------------------------------


@dataclass(frozen=True)
class JobKeys:
    """The keys of a job in etcd."""

    #: The prefix of all keys of the job.
    root: str

    @classmethod
    def of(cls, job: str, prefix: str) -> JobKeys:
        # Quoted: the keys of job `a/b` must not be under those of `a`, which are deleted when that
        # job ends.
        return cls(f"/{prefix.strip('/')}/{quote(job, safe='')}/")

    @property
    def job(self) -> str:
        """The key of the job itself. The first node creates it; it is deleted with the others, and
        distinguishes this job from the next with the same id."""
        return f"{self.root}job"

    @property
    def prefix(self) -> str:
        """The prefix of the keys that callers see."""
        return f"{self.root}keys/"

    def full(self, key: str) -> str:
        return self.prefix + key

    def short(self, full: str) -> str:
        return full.removeprefix(self.prefix)


# --- requests ------------------------------------------------------------------------------------


def key_range(prefix: str) -> Json:
    """All keys with this prefix."""
    return {"key": _pack(prefix), "range_end": _pack(_end(prefix.encode()))}


def get(prefix: str) -> Json:
    return {"request_range": key_range(prefix)}


def get_one(key: str) -> Json:
    return {"request_range": {"key": _pack(key)}}


def put(key: str, value: bytes, lease: str = "0") -> Json:
    return {"request_put": {"key": _pack(key), "value": _pack(value), "lease": lease}}


def delete_one(key: str) -> Json:
    return {"request_delete_range": {"key": _pack(key)}}


def delete(prefix: str) -> Json:
    return {"request_delete_range": key_range(prefix)}


def txn(compare: Sequence[Json], then: Sequence[Json], otherwise: Sequence[Json]) -> Json:
    return {"compare": list(compare), "success": list(then), "failure": list(otherwise)}


def if_created(key: str, revision: int) -> Json:
    """The condition that a key was created at this revision (0: that it is absent)."""
    return _condition({"key": _pack(key)}, "CREATE", "create_revision", revision)


def if_modified(key: str, revision: int) -> Json:
    """The condition that a key last changed at this revision (0: that it is absent)."""
    return _condition({"key": _pack(key)}, "MOD", "mod_revision", revision)


def if_no_other_keys(prefix: str, *but: str) -> list[Json]:
    """The condition that no key begins with `prefix`, except those that are or begin with one of
    `but`."""
    start = prefix.encode()
    conditions = []
    for left in sorted(but):
        conditions.append(_if_empty(start, left.encode()))
        start = _end(left.encode())
    return [*conditions, _if_empty(start, _end(prefix.encode()))]


def _if_empty(start: bytes, end: bytes) -> Json:
    keys = {"key": _pack(start), "range_end": _pack(end)}
    return _condition(keys, "CREATE", "create_revision", 0)


def watch(prefix: str, after: int) -> Json:
    return {"create_request": {**key_range(prefix), "start_revision": str(after + 1)}}


def grant(lease: str, seconds: int) -> Json:
    return {"ID": lease, "TTL": str(seconds)}


def of_lease(lease: str) -> Json:
    return {"ID": lease}


def authenticate(user: str, password: str) -> Json:
    return {"name": user, "password": password}


def encode_value(value: Json, *, stamp: str, job: int) -> bytes:
    """A value as etcd stores it, with its writer's stamp and the revision that created its job."""
    content = {"stamp": stamp, "job": job, "value": value}
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def puts(
    keys: JobKeys, values: Mapping[str, Json], leases: Mapping[str, str], *, stamp: str, job: int
) -> list[Json]:
    """Requests that set these keys, each under its lease if it has one."""
    raw = {key: encode_value(value, stamp=stamp, job=job) for key, value in values.items()}
    _check_size(raw)
    return [put(keys.full(key), text, leases.get(key, "0")) for key, text in raw.items()]


def _check_size(values: Mapping[str, bytes]) -> None:
    """Raise an error for a change that is too large for etcd."""
    if len(values) > KEYS_LIMIT:
        raise WireError(
            f"A change of {len(values)} keys at once is too large: etcd accepts at most "
            f"{KEYS_LIMIT}."
        )
    size = sum(map(len, values.values()))
    if size > VALUE_LIMIT:
        raise WireError(
            f"The value of '{min(values)}'"
            + (f" and {len(values) - 1} more take" if len(values) > 1 else " takes")
            + f" {size} bytes; etcd is given at most {VALUE_LIMIT} at once."
        )


def _condition(keys: Json, target: str, field: str, revision: int) -> Json:
    return {**keys, "target": target, "result": "EQUAL", field: str(revision)}


def _end(prefix: bytes) -> bytes:
    """The first key after all with this prefix; our prefixes end with a character below 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _pack(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


# --- answers -------------------------------------------------------------------------------------


def read(status: int, body: bytes) -> Json:
    """The answer to a request, or the next message of a stream; raises `EtcdBusy` or
    `EtcdRefused`."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        if status >= 500:
            raise EtcdBusy(f"HTTP status {status}")
        if _COMMON_NAME in body:
            raise RendezvousRefused(
                "etcd accepts no password from a client whose certificate has a common name "
                "(CN): use a cert without one, or omit etcd_user."
            )
        raise WireError(f"The answer is not from etcd: HTTP status {status} without JSON.")
    if status != 200 or "error" in answer:
        raise _error(status, answer)
    # Streams wrap their messages; other answers do not.
    result = answer.get("result", answer)
    if not isinstance(result, dict) or not isinstance(result.get("header"), dict):
        raise WireError("The answer is not from etcd: it has no header.")
    return result


def _error(status: int, answer: Json) -> EtcdBusy | EtcdRefused:
    # In streams the error is an object.
    inner = answer["error"] if isinstance(answer.get("error"), dict) else answer
    told = str(inner.get("message") or inner.get("error") or f"HTTP status {status}")
    message = printable(told)
    code = inner.get("code", inner.get("grpc_code"))
    if not isinstance(code, int):
        code = 14 if status >= 500 else 2
    return EtcdBusy(message) if code in _TEMPORARY else EtcdRefused(code, message)


def check_watch(message: Json) -> None:
    """Raise `EtcdBusy` if etcd ended a watch for a temporary reason."""
    if message.get("canceled") and not message.get("compact_revision"):
        raise EtcdBusy(str(message.get("cancel_reason") or "etcd ended the watch"))


def token(answer: Json) -> str:
    """The token that replaces the password from now on."""
    found = answer.get("token")
    # It is used as a header without encoding.
    if not isinstance(found, str) or not found.isascii() or not found.isprintable() or not found:
        raise WireError("etcd's answer has no token.")
    return found


def is_login_over(error: EtcdRefused) -> bool:
    """Return whether etcd does not know the token (any more)."""
    return error.code == _UNAUTHENTICATED or "revision of auth store is old" in error.message


def revision(answer: Json) -> int:
    """The store's revision as of an answer."""
    return _number(answer["header"], "revision")


def rows(response: Json) -> list[Json]:
    """The rows of a range, alone or as part of a transaction."""
    found = response.get("response_range", response).get("kvs", [])
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise WireError("etcd's answer lacks rows.")
    return found


def responses(answer: Json, count: int) -> list[Json]:
    """The answers of the transaction branch that was taken."""
    found = answer.get("responses", [])
    if len(found) != count or not all(isinstance(item, dict) for item in found):
        raise WireError(f"etcd answered {len(found)} of {count} parts of a request.")
    return list(found)


def created(row: Mapping[str, Any]) -> int:
    return _number(row, "create_revision")


def modified(row: Mapping[str, Any]) -> int:
    return _number(row, "mod_revision")


def stamp_of(row: Mapping[str, Any]) -> str:
    """The stamp with which the writer of a value recognises it."""
    return str(_content(row).get("stamp"))


def lease_of(row: Mapping[str, Any]) -> str:
    """The lease that a key is under; `0`: none."""
    return str(_number(row, "lease"))


def listing(answer: Json, response: Json, keys: JobKeys) -> Listing:
    """Rows in the callers' form."""
    items = {_key(row, keys): _item(row) for row in rows(response)}
    return Listing(revision(answer), items)


def changes(answer: Json, keys: JobKeys) -> list[Change]:
    """The changes in a watch message."""
    return [_change(event, keys) for event in answer.get("events", [])]


def is_of_another_job(answer: Json, job: int) -> bool:
    """Return whether a watch message has a change from another job with the same id."""
    rows = [event["kv"] for event in answer.get("events", []) if event.get("type") != "DELETE"]
    return any(_content(row).get("job") != job for row in rows)


def time_to_live(answer: Json) -> int:
    """Seconds a lease has; 0 if it has ended."""
    return _number(answer, "TTL")


def _change(event: Json, keys: JobKeys) -> Change:
    row = event["kv"]
    gone = event.get("type") == "DELETE"
    return Change(_key(row, keys), None if gone else _item(row), modified(row))


def _key(row: Mapping[str, Any], keys: JobKeys) -> str:
    return keys.short(_unpack(row["key"]).decode())


def _item(row: Mapping[str, Any]) -> Item:
    return Item(_content(row)["value"], created(row), modified(row))


def _content(row: Mapping[str, Any]) -> Json:
    """A value as written, with its envelope."""
    try:
        content = json.loads(_unpack(row.get("value", "")))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("value"), dict):
        name = _unpack(row["key"]).decode(errors="replace")
        raise WireError(
            f"'{name}' in etcd was not written by torchelastic: delete it, or choose another "
            "etcd_prefix."
        )
    return content


def _number(fields: Mapping[str, Any], name: str) -> int:
    try:
        return int(fields.get(name, 0))
    except (TypeError, ValueError):
        raise WireError(f"etcd's answer has no number for '{name}'.") from None


def _unpack(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise WireError("etcd's answer is not valid base64.") from None
