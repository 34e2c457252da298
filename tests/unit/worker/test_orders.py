"""Orders and reports: each is read as it was written, and nothing else is taken for one."""

import json
from dataclasses import replace
from typing import get_args

import pytest

from tests.unit.worker.entering import enter
from torchelastic.worker import orders

ALL = [
    replace(enter(3, after=17), rank=5, size=8, local_rank=1, local_size=4, node_rank=2, nodes=6),
    orders.Ask(3),
    orders.Through(3, 17),
    orders.Over(3, "a node failed", finished=True, through=17),
    orders.Leave(15, 1234.5, saves=True),
    orders.Closed("done"),
    orders.Ping(),
    orders.Dump(),
    orders.StatusPage(),
    orders.Enlisted(),
    orders.Keeps(),
    orders.CanSave(together=True),
    orders.Saved(),
    orders.Entered(3, -1),
    orders.Begins(3, 0, stored=False),
    orders.Up(3, 17, 4096, 0.25, 1.5),
    orders.Stopped(3, 17),
    orders.Erred(3, 17, "ValueError: no", "Traceback", retry=False),
    orders.PeerLost(3, 17, "gone"),
    orders.Unfit(),
    orders.Finished(3, 17),
    orders.Returned(),
    orders.Stored(7, 0.5, 1000),
    orders.Pong(waiting=True, aborted=True),
]


def test_every_message_survives_its_journey():
    assert {type(one) for one in ALL} == set(get_args(orders.Order | orders.Report))
    for message in ALL:
        assert orders.from_json(json.loads(json.dumps(orders.to_json(message)))) == message


def test_other_messages_are_none_of_ours_and_a_wrong_field_is_refused():
    assert orders.from_json({"type": "progress", "step": 3}) is None
    for data in (
        {"type": "enter", "generation": 1},
        {"type": "stopped", "generation": 1, "step": None},
        {"type": "up", "generation": 1, "step": 2, "built": "long"},
        {"type": "pong", "waiting": 1},
    ):
        with pytest.raises(ValueError, match=f"of a message '{data['type']}' "):
            orders.from_json(data)
