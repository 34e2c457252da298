"""Where events go besides their file: by name, and without anybody waiting for it."""

import logging
import threading

import pytest

from tests.support import poll_for
from tests.unit.cli.tables import not_refused
from torchelastic.errors import ConfigError
from torchelastic.events import handlers
from torchelastic.events.handlers import HandlerThread, sink_for

_taken = []
_seen = []


def take(line):
    """A handler of one's own."""
    _taken.append(line)


class Kept(logging.Handler):
    """A handler as torch has them."""

    def emit(self, record):
        _seen.append((record.name, record.levelname, record.getMessage()))

    def flush(self):
        _seen.append("flushed")


INSTANCE = Kept()
NUMBER = 17


@pytest.fixture(autouse=True)
def nothing_yet():
    _taken.clear()
    _seen.clear()


def tell(name, *lines):
    sink = sink_for(name)
    for line in lines:
        sink(line)
    sink.close(30)


def test_nowhere_stderr_and_a_function_of_a_module(capsys):
    assert sink_for("null") is sink_for("dynamic_rendezvous") is None
    tell("console", '{"v":1}')
    assert capsys.readouterr().err == '{"v":1}\n'
    tell(f"{__name__}:take", "a", "b")
    assert _taken == ["a", "b"]


@pytest.mark.parametrize("attribute", ["Kept", "INSTANCE"])
def test_a_logging_handler_gets_records_as_torchs_do(attribute):
    name = f"{__name__}:{attribute}"
    tell(name, "100 %s")
    assert _seen == [(f"torchelastic-events-{name}", "INFO", "100 %s"), "flushed"]


def test_a_package_registers_a_name(tmp_path, monkeypatch):
    installed = tmp_path / "kafka-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kafka\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[{handlers.GROUP}]\nkafka = {__name__}:take\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tell("kafka", "a")
    assert _taken == ["a"]
    with pytest.raises(ConfigError, match="use one of null, console, kafka, or PACKAGE"):
        sink_for("kafak")


def test_event_handler_of_another_type_is_refused():
    cases = [
        ("nowhere", "does not know 'nowhere': use one of null, console, or PACKAGE"),
        ("no.such.module:take", "cannot be imported .* to PYTHONPATH"),
        (f"{__name__}:missing", "cannot be imported"),
        (f"{__name__}:NUMBER", "is 17, which cannot handle events"),
        ("collections:OrderedDict", "which cannot handle events"),
    ]
    assert not_refused(sink_for, cases) == []


def test_a_handler_that_is_stuck_costs_events_and_nothing_else(caplog):
    stuck, entered = threading.Event(), threading.Event()

    def handler(line):
        entered.set()
        stuck.wait()

    last = HandlerThread("last", lambda line: stuck.wait() and None)
    last("with room for many more behind it")
    last.close(patience=0.001)
    assert caplog.text.count("--event-log-handler last did not take the last events") == 1
    sink = HandlerThread("slow", handler, waiting=2)
    sink("in the handler")
    assert entered.wait(30)
    for number in range(5):
        sink(f"waiting {number}")
    assert sink.lost == 3
    sink.close(patience=0.001)
    assert caplog.text.count("--event-log-handler slow is stuck or too slow") == 1
    stuck.set()
    sink.close(30)
    last._thread.join(30)


def test_a_handler_that_fails_is_asked_again_and_told_once(caplog):
    taken = []

    def handler(line):
        taken.append(line)
        raise OSError("disk full")

    sink = HandlerThread("broken", handler)
    sink("a")
    sink("b")
    poll_for(lambda: sink.lost == 2, what="both")
    sink.close(30)
    assert taken == ["a", "b"]
    assert caplog.text.count("failed: OSError('disk full')") == 1
