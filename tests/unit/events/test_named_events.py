"""Events of the user's own reach their handler."""

import pytest

from torchelastic.events import named_events


@pytest.fixture(autouse=True)
def as_at_the_start(monkeypatch):
    monkeypatch.setattr(named_events, "_default", named_events._default)
    monkeypatch.setattr(named_events, "_handlers", {})


class Kept(named_events.EventLogHandler):
    def __init__(self):
        self.events = []

    def log_event(self, event_name, message):
        self.events.append((event_name, message))


def test_by_default_events_go_nowhere(capsys):
    named_events.get_event_logger().log_event("started", "{}")
    assert capsys.readouterr().out == ""


def test_a_group_may_have_a_handler_of_its_own():
    all_others, own = Kept(), Kept()
    named_events.configure(all_others)
    named_events.configure(own, "mine")
    named_events.get_event_logger("mine").log_event("a", "1")
    named_events.get_event_logger("other").log_event("b", "2")
    named_events.get_event_logger().log_event("c", "3")
    assert own.events == [("a", "1")]
    assert all_others.events == [("b", "2"), ("c", "3")]


def test_the_console_handler_prints_a_line(capsys):
    """0.1's raised an IndexError here."""
    named_events.ConsoleEventLogHandler().log_event("started", "rank 0")
    assert capsys.readouterr().out.endswith("][started]: rank 0\n")
