"""Event types: names and fields are part of the format, and all are documented."""

import dataclasses
import math

from tests.unit.cli.tables import wrong
from torchelastic.events import types
from torchelastic.events.types import EVENTS, Event, from_fields

ENVELOPE = {"v", "type", "job", "node", "wall", "mono", "generation", "heard"}


NAMES = """
agent-started became-leader checkpoint-stored generation-over hang job-ended joined leader-found
lease-lost leaving node-joined node-leaving node-lost note progress restart-decided signal-received
standby-started states-differed step-skipped straggler training waiting weights-hashed worker-exited
worker-failed worker-killed workers-started workers-stopped world-changing world-formed zygote-ready
zygote-unavailable
"""


def test_the_names_are_part_of_the_format_and_stay():
    assert sorted(EVENTS) == NAMES.split()


def test_every_event_type_is_listed_and_no_field_hides_the_envelope():
    declared = {item for item in vars(types).values() if isinstance(item, type)}
    events = {item for item in declared if issubclass(item, Event) and item is not Event}
    assert events == set(EVENTS.values())
    for cls in EVENTS.values():
        assert not {item.name for item in dataclasses.fields(cls)} & ENVELOPE, cls


WORLD = {"nodes": ["a", "b"], "size": 4, "store": "a:1", "reason": "", "restarts_used": 0}
PROGRESS = {"ranks": [0, 1], "steps": [4, -1], "at": [2.5, 0.0], "stalls": {"data": 1}}


LINES = [
    ("note", {"text": "x"}, types.Note("x")),
    ("note", {"text": "x", "added later": 1}, types.Note("x")),
    ("note", {"text": 3}, None),
    ("note", {}, None),
    ("unheard-of", {}, None),
    ("zygote-ready", {"seconds": 1}, types.ZygoteReady(1)),
    ("zygote-ready", {"seconds": True}, None),
    ("world-formed", WORLD | {"spares": []}, types.WorldFormed(["a", "b"], 4, "a:1", "", 0, [])),
    ("world-formed", WORLD | {"nodes": "ab"}, None),
    ("world-formed", WORLD | {"nodes": [1]}, None),
    ("generation-over", {"kind": "resize", "reason": ""}, types.GenerationOver("resize", "")),
    ("generation-over", {"kind": "whim", "reason": ""}, None),
    ("job-ended", {"exitcode": 0, "reason": "", "cause": None}, types.JobEnded(0, "")),
    ("job-ended", {"exitcode": 0, "reason": "", "cause": []}, None),
    ("worker-failed", {"failure": {"rank": 1}}, types.WorkerFailed({"rank": 1})),
    ("progress", PROGRESS, types.Progress([0, 1], [4, -1], [2.5, 0.0], {"data": 1})),
    ("progress", PROGRESS | {"stalls": {"data": "long"}}, None),
    ("progress", PROGRESS | {"at": [math.inf, 0.0]}, None),
    ("training", {"rank": 0, "step": 3, "received": 9}, types.Training(0, 3, 9, 0.0, 0.0)),
    ("training", {"rank": 0, "step": 3, "received": 9, "built": math.nan}, None),
]


def test_a_line_becomes_the_event_it_tells_of():
    assert wrong(from_fields, LINES) == []


# --- the page ------------------------------------------------------------------------------------
