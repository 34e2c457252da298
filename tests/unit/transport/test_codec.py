"""Dataclasses as JSON and back: what fits its declaration is read, all else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pytest

from torchelastic.transport import codec
from torchelastic.transport.codec import Codec, Count


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


def test_what_is_written_is_read():
    conversation = Codec(Everything, Needs, prefix="test.")
    for message in (Everything(), FULL, Needs(1, "two")):
        sent = through_json(conversation.to_json(message))
        assert sent["type"] == f"test.{type(message).__name__.lower()}"
        read = conversation.from_json(sent)
        assert type(read) is type(message)
        assert through_json(conversation.to_json(read)) == sent


def test_what_fits_is_read_as_it_is_declared():
    for name, value, expected in (
        ("real", 3, 3),
        ("real", 10**400, 10**400),
        ("real_or_none", None, None),
        ("maybe", None, None),
        ("names", [], []),
        ("pair", [3, 4], (3, 4)),
        ("many", [{"name": "a", "later": 1}], (Inner("a"),)),
        ("count", 0, 0),
    ):
        found = getattr(codec.read(Everything, {name: value}, "it"), name)
        assert (found, type(found)) == (expected, type(expected))


def test_what_does_not_fit_is_refused_by_name():
    wrong = {
        "truth": [1, None],
        "whole": [True, 1.0, "1"],
        "count": [-1, True],
        "real": [True, "1.5", float("nan"), float("inf")],
        "text": [1, None],
        "maybe": ["none", False],
        "word": ["three", ["one"]],
        "names": ["ab", ["a", 1], {"a": 1}],
        "pair": [[1], [1, 2, 3], [1, "2"], 12],
        "many": [[{"number": 1}], ["a"], {"name": "a"}],
        "inner": [{"name": 1}, None],
        "anything": [[1], None],
    }
    assert set(wrong) | {"real_or_none"} == {field.name for field in fields(Everything)}
    for name, values in wrong.items():
        told = f"^'{name}' of a line has the wrong value: .*[.]$"
        for value in values:
            with pytest.raises(ValueError, match=told):
                codec.read(Everything, {name: value}, "a line")


def test_what_is_missing_is_named_and_what_a_later_release_adds_left_alone():
    for data, missing in (({}, "first"), ({"first": 1}, "second"), ({"second": "b"}, "first")):
        with pytest.raises(ValueError, match=f"^'{missing}' of a message 'needs' is missing[.]$"):
            Codec(Needs).from_json({"type": "needs", **data})
    data = {"type": "needs", "first": 1, "second": "b", "fourth": 4}
    assert Codec(Needs).from_json(data) == Needs(1, "b")


def test_other_messages_are_none_of_ours():
    for data in ({}, {"type": "other"}, {"type": ["needs"]}, {"type": None}):
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
