"""Dataclasses as JSON and back: what fits its declaration is read, all else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from torchelastic import codec
from torchelastic.codec import Codec, Count


@dataclass(frozen=True)
class Inner:
    name: str
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Everything:
    truth: bool = True
    whole: int = 0
    count: Count = 0
    real: float = 0.0
    text: str = ""
    maybe: int | None = None
    real_or_none: float | None = None
    word: Literal["one", "two"] = "one"
    names: Sequence[str] = ()
    pair: tuple[int, int] = (0, 0)
    many: tuple[Inner, ...] = ()
    inner: Inner = Inner("x")
    anything: Mapping[str, Any] = field(default_factory=dict)


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
    word="two",
    names=["a", "b"],
    pair=(1, -2),
    many=(Inner("a"), Inner("b", 2)),
    inner=Inner("c", 4),
    anything={"any": [1, {"thing": None}]},
)


def through_json(data):
    return json.loads(json.dumps(data))


@pytest.mark.parametrize("message", [Everything(), FULL, Needs(1, "two")], ids=repr)
def test_what_is_written_is_read(message):
    conversation = Codec(Everything, Needs, prefix="test.")
    sent = through_json(conversation.to_json(message))
    assert sent["type"] == f"test.{type(message).__name__.lower()}"
    read = conversation.from_json(sent)
    assert type(read) is type(message)
    assert through_json(conversation.to_json(read)) == sent


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("real", 3, 3),
        ("real", 10**400, 10**400),
        ("real_or_none", None, None),
        ("maybe", None, None),
        ("names", [], []),
        ("pair", [3, 4], (3, 4)),
        ("many", [{"name": "a", "later": 1}], (Inner("a"),)),
        ("count", 0, 0),
    ],
)
def test_what_fits_is_read_as_it_is_declared(field, value, expected):
    found = getattr(codec.read(Everything, {field: value}, "it"), field)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truth", 1),
        ("truth", None),
        ("whole", True),
        ("whole", 1.0),
        ("whole", "1"),
        ("count", -1),
        ("count", True),
        ("real", True),
        ("real", "1.5"),
        ("real", float("nan")),
        ("real", float("inf")),
        ("text", 1),
        ("text", None),
        ("maybe", "none"),
        ("maybe", False),
        ("word", "three"),
        ("word", ["one"]),
        ("names", "ab"),
        ("names", ["a", 1]),
        ("names", {"a": 1}),
        ("pair", [1]),
        ("pair", [1, 2, 3]),
        ("pair", [1, "2"]),
        ("pair", 12),
        ("many", [{"number": 1}]),
        ("many", ["a"]),
        ("many", {"name": "a"}),
        ("inner", {"name": 1}),
        ("inner", None),
        ("anything", [1]),
        ("anything", None),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^'{field}' of a line is not what it should be: .*[.]$"):
        codec.read(Everything, {field: value}, "a line")


@pytest.mark.parametrize(
    ("data", "missing"), [({}, "first"), ({"first": 1}, "second"), ({"second": "b"}, "first")]
)
def test_what_is_missing_is_named(data, missing):
    with pytest.raises(ValueError, match=f"^'{missing}' of a message 'needs' is missing[.]$"):
        Codec(Needs).from_json({"type": "needs", **data})


def test_what_a_later_release_adds_is_left_alone():
    data = {"type": "needs", "first": 1, "second": "b", "fourth": 4}
    assert Codec(Needs).from_json(data) == Needs(1, "b")


@pytest.mark.parametrize("data", [{}, {"type": "other"}, {"type": ["needs"]}, {"type": None}])
def test_other_messages_are_none_of_ours(data):
    assert Codec(Needs).from_json({"first": 1, "second": "b", **data}) is None


def test_a_sentence_stays_short_whatever_was_sent():
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (its length is what is looked at)
        codec.read(Needs, {"first": "x" * 10_000, "second": ""}, "it")
    assert len(str(refused.value)) < 200


@dataclass(frozen=True)
class Unchecked:
    what: set[int]


def test_a_declaration_that_could_not_be_checked_is_refused():
    with pytest.raises(TypeError, match="read unchecked"):
        codec.read(Unchecked, {"what": [1]}, "it")
