"""Dataclasses as JSON and back: what fits its declaration is read, all else is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, NamedTuple

import pytest

from torchelastic.transport.codec import Codec, Count


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
