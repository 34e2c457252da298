"""Messages about snapshots: what is sent is what is read, and nothing else is."""

import json

import pytest

from torchelastic.snapshot import messages
from torchelastic.snapshot.messages import InventoryItem

HOLDING = InventoryItem("own:1", (2, 30), 4096, 1, 4, replica=True)
ALL = [
    messages.Room(1, "shared", 10, 20),
    messages.Inventory(2),
    messages.Open(3, "own:1", (0, 5)),
    messages.Fetch(4, "own:1", (0, 5), "10.0.0.2:29400"),
    messages.Drop(5, "shared", (0, 5)),
    messages.Sealed("shared", (1, 7)),
    messages.Settled((1, 7), 2),
    messages.Outdated((1, 7)),
    messages.Granted(1),
    messages.Opened(3),
    messages.Dropped(5),
    messages.Refused(4, "No."),
    messages.NodeInventory(2, (HOLDING,), "10.0.0.1:29400", "node-a"),
]


def test_a_message_survives_its_journey():
    for message in ALL:
        assert messages.from_json(json.loads(json.dumps(messages.to_json(message)))) == message
    assert messages.from_json({"type": "progress", "step": 3}) is None  # none of ours


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("open", {"piece": "shared"}),
        ("open", {"piece": 7, "version": [0, 1]}),
        ("open", {"request": True, "piece": "shared", "version": [0, 1]}),
        ("open", {"piece": "shared", "version": [0]}),
        ("open", {"piece": "shared", "version": [0, "1"]}),
        ("room", {"piece": "s", "bytes": -1, "skeleton_bytes": 0}),
        ("holdings", {"holdings": "many"}),
        ("holdings", {"holdings": [{"piece": "shared"}]}),
    ],
)
def test_a_field_that_is_wrong_is_refused(kind, fields):
    with pytest.raises(ValueError, match="message"):
        messages.from_json({"type": f"snapshot.{kind}", "request": 1, **fields})
