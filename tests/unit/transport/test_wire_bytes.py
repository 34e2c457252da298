"""The exact bytes that agents, workers and files exchange: a change of them must be meant.

`wire_bytes.txt` has a line for each sample: its name, a tab, its bytes. Samples of messages are
built from their declarations, all fields set (`full`) and only the required ones (`least`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tests.test_architecture import FILES, PACKAGE
from torchelastic.agent.watch import inspector
from torchelastic.events.analysis.hangs import RankActivity
from torchelastic.rendezvous.embedded import state_file
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.embedded.state_file import KeptJob, RecordedTable, StateFile
from torchelastic.rendezvous.embedded.voter_file import VoterFile
from torchelastic.rendezvous.majority import Elector, Electorate, Roll
from torchelastic.rendezvous.world import Member, World
from torchelastic.snapshot.node.stream import GIVE, WANT, Header
from torchelastic.transport import frames
from torchelastic.transport.codec import Codec, Count
from torchelastic.transport.frames import Row

GOLDEN = dict(
    line.split("\t", 1)
    for line in Path(__file__).with_name("wire_bytes.txt").read_text().splitlines()
)
Sample = tuple[str, str]
PLAIN = {bool: True, int: 7, Count: 7, float: 1.5, NoneType: None, Any: {"any": [1, None]}}


def value_of(hint: Any, name: str) -> Any:
    """A value for a field of this type; not None if it can be something else."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is str:
        return f"{name} é"
    if hint in PLAIN:
        return PLAIN[hint]
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return sample(hint)
    if origin is Literal:
        return args[0]
    if origin in (UnionType, Union):
        return value_of(args[0], name)
    if origin in (Mapping, dict):
        return {"key": value_of(args[1], name)}
    if origin in (list, Sequence):
        return [value_of(args[0], name)]
    assert origin is tuple, f"say here which value a field of type {hint} has"
    return tuple(value_of(arg, name) for arg in args if arg is not ...)


def sample(cls: Any) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    names = getattr(cls, "_fields", None) or [item.name for item in dataclasses.fields(cls)]
    return cls(**{name: value_of(hints[name], name) for name in names})


def least(cls: Any) -> Any:
    """The same without fields that have a default, and with None where that is allowed."""
    hints = get_type_hints(cls, include_extras=True)
    given = {}
    for item in dataclasses.fields(cls):
        if item.default is item.default_factory is dataclasses.MISSING:
            optional = NoneType in get_args(hints[item.name])
            given[item.name] = None if optional else value_of(hints[item.name], item.name)
    return cls(**given)


def samples_of(cls: Any) -> dict[str, Any]:
    full = {"full": sample(cls)}
    return full if least(cls) == sample(cls) else {**full, "least": least(cls)}


def declared() -> Iterator[tuple[str, Codec[Any]]]:
    """Every conversation that some module declares, with the module's name."""
    for path in FILES:
        if re.search(r"= (by_kind|Codec)\(", path.read_text()):
            name = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
            for value in vars(importlib.import_module(name)).values():
                if isinstance(value, Codec):
                    yield path.stem, value


def messages() -> Iterator[Sample]:
    for module, conversation in declared():
        for name, cls in conversation.kinds.items():
            for which, message in samples_of(cls).items():
                if isinstance(message, frames.Message):
                    frame = frames.pack(message)
                    assert frame[:4] == (len(frame) - 4).to_bytes(4, "big")
                    text = frame[4:].decode()
                else:
                    text = json.dumps(conversation.to_json(message))
                assert conversation.from_json(json.loads(text)) == message
                yield f"{module} {name} {which}", text


def rows_in_frames() -> Iterator[Sample]:
    """Frames that are not packed as the others are."""
    yield "frames rows packed", frames.pack_rows(7, 9, [Row("k", "{}", 1, 2)], True)[4:].decode()
    before = frames.pack_before(sample(inspector.These), inspector.lines_of([sample(RankActivity)]))
    head, _, rest = before[4:].decode().partition("\n")
    yield "inspector head of lines", head
    yield "inspector line", rest


def records() -> Iterator[Sample]:
    for cls in (Member, World):
        for which, record in samples_of(cls).items():
            text = frames.encode_value("key", record.to_json())
            assert cls.from_json(frames.decode_value(text)) == record
            yield f"{cls.__name__} {which}", text
    yield "World summary", frames.encode_value("key", sample(World).summary())
    for key, part in dataclasses.replace(sample(World), part_count=1).parts().items():
        yield f"World {key}", frames.encode_value(key, part)
    for which, header in {
        "full": Header(
            kind=GIVE,
            piece="own:999999999",
            version=(4, 5),
            origin="0123456789ab",
            rank=3,
            size=6,
            room=1 << 40,
            skeleton_room=1 << 20,
            used=8,
            skeleton=77,
            checksum=0xFFFFFFFF,
            before=(4, 4),
        ),
        "least": Header(kind=WANT, piece="shared", version=(3, 4)),
    }.items():
        assert Header.unpack(header.pack()) == header
        yield f"stream header {which}", header.pack().hex()


def files(directory: Path) -> Iterator[Sample]:
    old, new = Electorate(frozenset("ab"), "a", "after-1"), Electorate(frozenset("bc"), "b")
    held = FailoverState(
        Roll(3, new, (old,)), ("b", "c"), {"b": "h:1"}, {"world": {"generation": 3}}
    )
    voter = VoterFile(directory / "voter", "c", {"job": "job", "machine": "m"})
    asyncio.run(voter.keep(Elector("c", 5, "b", 3), held, "token"))
    asyncio.run(voter.keep(Elector("c", 6, "c", 3), held, "token"))
    voter.close()
    again = VoterFile(directory / "voter", "c", {"job": "job", "machine": "m"})
    assert again.resume(gone=(), is_late=False)
    assert again.resumed is not None
    assert (again.resumed.term, again.resumed.holding) == (6, held)
    again.close()

    table = RecordedTable("job")
    table.open_lease("t" * 16, 1.5, 0.0)
    table.put("old", '{"n":1}', lease="t" * 16, stamp="s/1")
    table.put("gone", "{}", lease="t" * 16)
    file = StateFile(str(directory / "state"))
    file.rewrite(state_file.snapshot({"job": KeptJob("store", table)}))
    table.record = lambda entry, lasting: file.append(entry, lasting=lasting)
    table.put("é", "{}", beside={"other": "{}"}, stamp="s/2")
    table.open_lease("u" * 16, 2, 0.0)
    table.end_lease("t" * 16)
    for entry in (["new", "other", "store-2"], ["forget", "other"]):
        file.append(entry, lasting=True)
    file.close()
    assert state_file.replay(StateFile(file.path).read(), 0.0)["job"].table.get("") == table.get("")
    for name in ("voter", "state"):
        for number, line in enumerate((directory / name).read_text().splitlines()):
            yield f"file {name} {number}", line


def test_wire_bytes_of_every_sample_are_unchanged(tmp_path):
    found = dict([*messages(), *rows_in_frames(), *records(), *files(tmp_path)])
    assert {name: text for name, text in found.items() if GOLDEN.get(name) != text} == {}
    assert sorted(GOLDEN) == sorted(found), "some are no longer sent"
