from __future__ import annotations

import dataclasses
from pathlib import Path

from torchelastic.events import event_reference
from torchelastic.events.types import EVENTS

PAGE = Path(__file__).parents[3] / "docs/reference/events.md"


def test_the_page_is_current():
    assert PAGE.read_text() == event_reference.page(), f"run: {event_reference.__doc__}"


def test_every_field_is_found_in_the_source():
    for cls in EVENTS.values():
        names = [name for name, _, _ in event_reference._fields(cls)]
        assert names == [item.name for item in dataclasses.fields(cls)], cls
