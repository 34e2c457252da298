from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, NamedTuple

import pytest

from torchelastic.errors import WireError
from torchelastic.transport import frames
from torchelastic.transport.codec import Codec, Count
from torchelastic.transport.frames import Row

MESSAGES = [
    frames.Hello(frames.PROTOCOL, frames.VERSION, "job", None),
    frames.Hello(frames.PROTOCOL, frames.VERSION, "job", "token"),
    frames.Hello(frames.PROTOCOL, frames.VERSION, "job", None, frames.RING, 3, "0" * 64),
    frames.Proof("1" * 64),
    frames.Get(1, "member/"),
    frames.Put(2, "k", '{"a":"é\\u0000\\""}', "me/2", None, False),
    frames.Put(3, "k", "{}", "me/3", 0, True),
    frames.Report(4, "k", "{}"),
    frames.Watch(4, "", 7),
    frames.Unwatch("member/"),
    frames.OpenLease(5, "token", 0.5),
    frames.OpenLease(5, "token", 3),
    frames.KeepAlive(6),
    frames.GiveUp(7, "member/a", 12, ("leader", 3)),
    frames.Bye(),
    frames.Welcome(frames.PROTOCOL, frames.VERSION, "name", True),
    frames.Challenge("0" * 64, "1" * 64),
    frames.Refusal("No."),
    frames.Elsewhere(["node1:29400", "[::1]:29400"], 3),
    frames.Elsewhere([], 0),
    frames.Rows(7, 9, [Row("k", "{}", 1, 2), Row("gone", None, 1, 3)], False),
    frames.Done(8, None),
    frames.Done(8, 12),
    frames.NoLease(9),
    frames.Changed("k", [Row("k", "{}", 1, 2)]),
    frames.LeaseEnded("token"),
]
ALL = frames.by_kind(*{type(message) for message in MESSAGES})


def payloads(data: bytes, step: int | None = None) -> list[bytes]:
    unpacker = frames.Unpacker()
    step = step or len(data)
    pieces = (data[start : start + step] for start in range(0, len(data), step))
    return [payload for piece in pieces for payload in unpacker.feed(piece)]


def payload_of(**content: object) -> bytes:
    return json.dumps(content).encode()


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 64, 1000])
def test_messages_survive_the_wire_however_the_bytes_arrive(step):
    data = b"".join(map(frames.pack, MESSAGES))
    assert [frames.parse(payload, ALL) for payload in payloads(data, step)] == MESSAGES


def test_frames_before_a_bad_one_are_handed_out():
    unpacker = frames.Unpacker()
    found = unpacker.feed(frames.pack(frames.Bye()) + b"HTTP/1.1 400")
    assert next(found)
    with pytest.raises(WireError, match="1213486160 bytes exceeds the limit"):
        next(found)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an object"),
        (b"{}", "not one of"),
        (payload_of(kind="steal"), "not one of"),
        (payload_of(kind=["get"]), "not one of"),
        (b'{"kind":' + b"[" * 900 + b"]" * 900 + b"}", "not one of"),
        (payload_of(kind="get", id=1), "'prefix' .* is missing"),
        (payload_of(kind="get", id="1", prefix=""), "'id' .* wrong value: '1'"),
        (payload_of(kind="get", id=True, prefix=""), "'id' .* wrong value: True"),
        (payload_of(kind="get", id=1, prefix=None), "'prefix' .* wrong"),
        (payload_of(kind="done", id=1, revision=True), "'revision' .* wrong"),
        (payload_of(kind="open_lease", id=1, token="t", seconds="3"), "'seconds' .* wrong"),
        (payload_of(kind="open_lease", id=1, token="t", seconds=False), "'seconds' .* wrong"),
        (
            payload_of(kind="open_lease", id=1, token="t", seconds=float("nan")),
            "'seconds' .* wrong",
        ),
        (payload_of(kind="changed", prefix="", rows={}), "'rows' .* wrong"),
        (payload_of(kind="changed", prefix="", rows=[["k", "{}", 1]]), "'rows' .* wrong"),
        (payload_of(kind="changed", prefix="", rows=[["k", {}, 1, 2]]), "'rows' .* wrong"),
    ],
)
def test_garbage_is_named(payload, problem):
    with pytest.raises(WireError, match=problem):
        frames.parse(payload, ALL)


def test_kinds_of_the_other_direction_are_refused():
    with pytest.raises(WireError, match="not one of"):
        frames.parse(payload_of(kind="done", id=1, revision=1), frames.REQUESTS)


def test_fields_of_a_later_release_are_left_alone():
    payload = payload_of(kind="keep_alive", id=1, mood="fine")
    assert frames.parse(payload, ALL) == frames.KeepAlive(1)


def test_a_hello_of_another_version_is_told_from_a_stranger():
    other = payload_of(kind="hello", protocol=frames.PROTOCOL, version=99, who="?")
    assert frames.parse_hello(other) == frames.OtherVersion("99")
    with pytest.raises(WireError, match="not a hello"):
        frames.parse_hello(payload_of(kind="hello", protocol="redis", version=1))
    with pytest.raises(WireError, match=r"'job' .* is missing"):
        frames.parse_hello(
            payload_of(kind="hello", protocol=frames.PROTOCOL, version=frames.VERSION)
        )


# Values


def test_values_come_back_as_they_went():
    value = {"text": 'é " \\ \udc80', "number": 1.5, "list": [None, True]}
    assert frames.decode_value(frames.encode_value("k", value)) == value


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("", {}, "1 to 512 characters"),
        ("k" * 513, {}, "1 to 512 characters"),
        ("world", {"x": '"' * (frames.FRAME_LIMIT // 2)}, "value of 'world' has"),
        ("k", {"x": float("nan")}, "JSON compliant"),
    ],
    ids=["no key", "a long key", "fits no frame", "no number to others"],
)
def test_frames_refuse_a_value_that_is_too_large(key, value, problem):
    with pytest.raises((WireError, ValueError), match=problem):
        frames.encode_value(key, value)
    for text in ("[]", "nonsense", "1"):
        with pytest.raises(WireError):
            frames.decode_value(text)


@pytest.mark.parametrize("filler", ["x", '"', "é", "\\"])
def test_the_largest_value_can_travel_in_every_message(filler, monkeypatch):
    monkeypatch.setattr(frames, "FRAME_LIMIT", 64 * 1024)
    key = "\udc80" * frames.KEY_LIMIT
    size = frames.FRAME_LIMIT
    while True:
        try:
            text = frames.encode_value(key, {"x": filler * size})
            break
        except WireError:
            size = size * 49 // 50
    big = 2**62
    row = Row(key, text, big, big)
    frames.pack(frames.Put(big, key, text, "s" * 64, big, True))
    frames.pack(frames.Rows(big, big, [row], False))
    frames.pack(frames.Changed(key, [row]))


@pytest.mark.parametrize(
    ("sizes", "portions"),
    [
        ([], [0]),
        ([10, 10], [2]),
        ([100, 100, 100], [2, 1]),
        ([1000, 10], [1, 1]),
        ([10, 1000, 10], [1, 1, 1]),
    ],
)
def test_rows_go_in_portions_that_fit(sizes, portions):
    rows = [Row("k", "x" * size, 1, 2) for size in sizes]
    made = frames.batches(rows, limit=600)
    assert [len(portion) for portion in made] == portions
    assert [row for portion in made for row in portion] == rows


def test_rows_that_several_ask_for_are_written_as_any_message():
    rows = [Row("k", '{"a":"\u00e9"}', 1, 2), Row("gone", None, 1, 3)]
    for id, last in ((7, False), (8, True), (9, True)):
        frame = frames.pack_rows(id, 9, rows, last)
        assert frames.parse(frames.payload_of(frame), frames.ANSWERS) == frames.Rows(
            id, 9, rows, last
        )
    with pytest.raises(WireError, match="too large"):
        frames.pack_rows(1, 1, [Row("k", "x" * frames.FRAME_LIMIT, 1, 1)], True)


# --- codec ----------------------------------------------------------------------------------------

# Dataclasses as JSON and back: what fits its declaration is read, all else is refused by name.


@dataclass(frozen=True)
class Inner:
    name: str
    number: int = 0


class Place(NamedTuple):
    node: str
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class Everything:
    truth: bool = True
    whole: int = 0
    count: Count = 0
    real: float = 0.0
    text: str = ""
    maybe: int | None = None
    real_or_none: float | None = None
    names: list[str] = field(default_factory=list)
    pair: tuple[int, int] = (0, 0)
    many: tuple[Inner, ...] = ()
    inner: Inner = Inner("x")
    texts: dict[str, str] = field(default_factory=dict)
    place: Place = field(default=Place("", 0))
    place_or_none: Place | None = None


@dataclass(frozen=True)
class Needs:
    first: int
    second: str
    third: int = 3


FULL = Everything(
    truth=False,
    whole=-3,
    count=3,
    real=1.5,
    text="a",
    maybe=7,
    real_or_none=2.0,
    names=["a", "b"],
    pair=(1, -2),
    many=(Inner("a"), Inner("b", 2)),
    inner=Inner("c", 4),
    texts={"any": "thing"},
    place=Place("a", None),
    place_or_none=Place("b", 1),
)


def through_json(data):
    return json.loads(json.dumps(data))


def read(cls, data):
    return Codec(cls).from_json({"type": cls.__name__.lower(), **data})


def test_codec_reads_what_it_writes():
    conversation = Codec(Everything, Needs, prefix="test.")
    for message in (Everything(), FULL, Needs(1, "two")):
        sent = through_json(conversation.to_json(message))
        assert sent["type"] == f"test.{type(message).__name__.lower()}"
        read = conversation.from_json(sent)
        assert type(read) is type(message)
        assert through_json(conversation.to_json(read)) == sent


def test_codec_fitting_field_is_read_as_declared():
    for name, value, expected in (
        ("real", 3, 3),
        ("real", 10**400, 10**400),
        ("real_or_none", None, None),
        ("maybe", None, None),
        ("names", [], []),
        ("place", ["a", None], Place("a", None)),
        ("place_or_none", None, None),
        ("pair", [3, 4], (3, 4)),
        ("many", [{"name": "a", "later": 1}], (Inner("a"),)),
        ("count", 0, 0),
    ):
        found = getattr(read(Everything, {name: value}), name)
        assert (found, type(found)) == (expected, type(expected))


def test_codec_wrong_field_is_refused_by_name():
    wrong = {
        "truth": [1, None],
        "whole": [True, 1.0, "1"],
        "count": [-1, True],
        "real": [True, "1.5", float("nan"), float("inf")],
        "text": [1, None],
        "maybe": ["none", False],
        "names": ["ab", ["a", 1], {"a": 1}],
        "pair": [[1], [1, 2, 3], [1, "2"], 12],
        "many": [[{"number": 1}], ["a"], {"name": "a"}],
        "inner": [{"name": 1}, None],
        "texts": [[1], None, {"a": 1}],
        "place": [
            ["a"],
            ["a", "b"],
            ["a", True],
            ["a", 1, 2],
            {"node": "a", "rank": 1},
            "ab",
            None,
        ],
        "place_or_none": [["a"], ["a", True], 1],
    }
    assert set(wrong) | {"real_or_none"} == {field.name for field in fields(Everything)}
    for name, values in wrong.items():
        told = f"^'{name}' of a message 'everything' has the wrong value: .*[.]$"
        for value in values:
            with pytest.raises(ValueError, match=told):
                read(Everything, {name: value})


def test_codec_missing_field_is_named_and_unknown_ones_ignored():
    for data, missing in (({}, "first"), ({"first": 1}, "second"), ({"second": "b"}, "first")):
        with pytest.raises(ValueError, match=f"^'{missing}' of a message 'needs' is missing[.]$"):
            Codec(Needs).from_json({"type": "needs", **data})
    data = {"type": "needs", "first": 1, "second": "b", "fourth": 4}
    assert Codec(Needs).from_json(data) == Needs(1, "b")


def test_other_messages_are_none_of_ours():
    for data in ({}, {"type": "other"}, {"type": ["needs"]}, {"type": None}):
        assert Codec(Needs).from_json({"first": 1, "second": "b", **data}) is None


@pytest.mark.parametrize("value", ["x" * 10_000, json.loads("[" * 900 + "]" * 900)])
def test_a_sentence_stays_short_whatever_was_sent(value):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (its length is what is looked at)
        read(Needs, {"first": value, "second": ""})
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "hint", [Any, set[int], dict[int, int], tuple[Count, Count], Inner | Count, list[Any]]
)
def test_a_declaration_that_could_not_be_checked_is_refused(hint):
    with pytest.raises(TypeError):
        Codec(make_dataclass("Unchecked", [("what", hint)]))
