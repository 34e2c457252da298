"""Every module path and name that the documentation of 0.1, 0.2 and torch's launcher shows."""

import importlib
import logging
import socket

import pytest

from torchelastic import events
from torchelastic.compat.release02.utilities import (
    create_c10d_store,
    get_free_port,
    get_logger,
    get_socket_with_port,
)
from torchelastic.errors import ConfigError
from torchelastic.events.record import Record
from torchelastic.launcher import LaunchConfig
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.rendezvous.etcd_rendezvous import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    EtcdStore,
    create_rdzv_handler,
)

PATHS = {
    "agent.server": "ElasticAgent LocalElasticAgent SimpleElasticAgent Worker WorkerGroup "
    "WorkerSpec WorkerState RunResult",
    "agent.server.api": "ElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup WorkerSpec "
    "WorkerState DEFAULT_ROLE",
    "agent.server.local_elastic_agent": "LocalElasticAgent",
    "checkpoint": "CheckpointManager FileSystemCheckpointManager CheckpointUtil "
    "set_checkpoint_manager get_checkpoint_manager",
    "coordinator": "Coordinator NonRetryableException StopException",
    "distributed": "all_gather_return_max_long broadcast_binary broadcast_bool "
    "broadcast_float_list broadcast_long broadcast_model get_rank",
    "distributed.launch": "main",
    "distributed.run": "main",
    "distributed.utils": "get_rank",
    "event_logger": "EventLogHandler configure get_event_logger",
    "events": "ConsoleEventHandler Event EventHandler NullEventHandler configure record "
    "record_event EventSource EventMetadataValue",
    "events.api": "ConsoleEventHandler Event EventHandler NullEventHandler configure record "
    "record_event EventSource EventMetadataValue",
    "fault_injection": "start_fault_injection_thread",
    "launcher": "LaunchConfig elastic_launch launch_agent",
    "launcher.api": "LaunchConfig elastic_launch launch_agent",
    "metrics": "MetricHandler ConsoleMetricHandler NullMetricHandler MetricData configure prof "
    "put_metric getStream MetricsConfig initialize_metrics",
    "metrics.api": "MetricHandler ConsoleMetricHandler NullMetricHandler MetricData MetricStream "
    "MetricsConfig configure prof profile put_metric publish_metric getStream get_elapsed_time_ms",
    "multiprocessing": "start_processes PContext MultiprocessContext SubprocessContext "
    "RunProcsResult Std to_map",
    "multiprocessing.api": "PContext MultiprocessContext SubprocessContext RunProcsResult Std "
    "to_map",
    "multiprocessing.errors": "record ChildFailedError ErrorHandler ProcessFailure "
    "get_error_handler",
    "multiprocessing.errors.error_handler": "ErrorHandler",
    "multiprocessing.errors.handlers": "get_error_handler",
    "p2p": "CoordinatorP2P",
    "p2p.coordinator_p2p": "CoordinatorP2P",
    "rendezvous": "RendezvousHandler RendezvousParameters RendezvousHandlerFactory "
    "RendezvousException RendezvousClosedException RendezvousTimeoutException "
    "RendezvousNonRetryableError",
    "rendezvous.api": "RendezvousHandler RendezvousParameters RendezvousHandlerFactory "
    "RendezvousHandlerCreator RendezvousException RendezvousClosedException "
    "RendezvousTimeoutException RendezvousNonRetryableError RendezvousError "
    "RendezvousClosedError RendezvousTimeoutError RendezvousConnectionError",
    "rendezvous.etcd_rendezvous": "EtcdRendezvousHandler EtcdRendezvous EtcdStore "
    "create_rdzv_handler",
    "rendezvous.etcd_server": "EtcdServer",
    "rendezvous.parameters": "RendezvousParameters",
    "rendezvous.registry": "get_rendezvous_handler",
    "state": "State",
    "timer": "configure expires LocalTimerClient LocalTimerServer TimerClient TimerServer "
    "TimerRequest RequestQueue FileTimerClient FileTimerServer FileTimerRequest",
    "timer.api": "configure expires TimerClient TimerServer TimerRequest RequestQueue",
    "timer.file_based_local_timer": "FileTimerClient FileTimerServer FileTimerRequest",
    "timer.local_timer": "LocalTimerClient LocalTimerServer MultiprocessingRequestQueue",
    "train_loop": "train run_train to_generator MAX_FAILURES",
    "utils.data": "CyclingIterator ElasticDistributedSampler",
    "utils.distributed": "create_c10d_store get_free_port get_socket_with_port",
    "utils.logging": "get_logger",
    "worker_stats": "WorkerStats SimpleWorkerStats",
}


def test_every_documented_path_and_name_is_there():
    missing = [
        f"torchelastic.{path}.{name}"
        for path, names in PATHS.items()
        for name in names.split()
        if not hasattr(importlib.import_module(f"torchelastic.{path}"), name)
    ]
    assert missing == []


def test_a_train_step_becomes_a_generator():
    left = [1, 2]

    def train_step(state):
        if not left:
            raise StopIteration
        return state, left.pop()

    steps = importlib.import_module("torchelastic.training.train").to_generator(train_step)
    assert list(steps("state")) == [("state", 2), ("state", 1)]


def test_the_agent_of_ones_own_is_refused_with_a_reason():
    from torchelastic.agent.server import LocalElasticAgent, SimpleElasticAgent

    class Mine(SimpleElasticAgent):
        def run(self, role="default"): ...

        def get_worker_group(self, role="default"): ...

    with pytest.raises(ConfigError, match=r"^Mine cannot start workers: .* Use Local"):
        Mine(None)
    assert issubclass(LocalElasticAgent, SimpleElasticAgent)


def test_the_rendezvous_at_etcd():
    params = RendezvousParameters("etcd", "node1:2379", "job", 1, 2)
    handler = create_rdzv_handler(params)
    assert isinstance(handler, EtcdRendezvousHandler)
    assert (handler.get_backend(), handler.get_run_id()) == ("etcd", "job")
    for kind in (EtcdRendezvous, EtcdStore):
        with pytest.raises(ConfigError, match="needs etcd's v2 API"):
            kind("client", "/prefix")
    with pytest.raises(ConfigError, match="whose backend is etcd"):
        create_rdzv_handler(RendezvousParameters("c10d", "", "job", 1, 2))


class Kept(events.EventHandler):
    def __init__(self):
        self.events = []

    def record(self, event):
        self.events.append((event.name, event.type, event.metadata))


def test_events_go_to_the_handler_of_their_type_or_destination(monkeypatch, capsys):
    monkeypatch.setattr(events.api, "_handlers", dict(events.api._handlers))
    monkeypatch.setattr(events.api, "_default", events.NullEventHandler())
    by_default, special = Kept(), Kept()
    events.configure(by_default)
    events.configure(special, "special")
    events.record("a", "special", {"x": 1})  # 0.2.1's way
    events.record_event(events.Event("b", metadata={}))
    events.record(events.Event("c", events.EventSource.WORKER, 5, {"y": 2}), "special")
    events.record(events.Event("d", "special"))  # 0.2.2's: the destination decides
    events.record(events.Event("e", "special"), "console")
    assert special.events == [("a", "special", {"x": 1}), ("c", "WORKER", {"y": 2})]
    assert by_default.events == [("b", "default", {}), ("d", "special", {})]
    assert '"name": "e"' in capsys.readouterr().out
    assert Record.__module__ == "torchelastic.events.record"
    assert callable(events.record), "the module of this name does not take it"


def test_an_event_of_either_release_can_be_written_and_read():
    new = events.Event("a", events.EventSource.AGENT, 7, {"x": 1})
    old = events.Event("a", "mine", {"x": 1}, 7)
    for event in (new, old):
        assert events.Event.deserialize(str(event)) == event == events.Event.deserialize(event)
    assert (new.timestamp, new.metadata) == (old.timestamp, old.metadata) == (7, {"x": 1})


def test_ports_stores_and_loggers():
    with get_socket_with_port() as held, pytest.raises(OSError, match="in use"):
        socket.create_server(("localhost", held.getsockname()[1]))
    assert 0 < get_free_port() < 65536
    store = create_c10d_store(True, "127.0.0.1", wait_for_workers=False)
    store.set("a", "b")
    assert create_c10d_store(False, "127.0.0.1", store.port, 1).get("a") == b"b"
    with pytest.raises(ValueError, match="server_port is required"):
        create_c10d_store(True, "127.0.0.1", world_size=2)
    assert get_logger().name == __name__
    assert get_logger("x").level == logging.WARNING


def test_a_config_is_the_same_wherever_it_comes_from():
    from torchelastic import LaunchConfig as public

    assert public is LaunchConfig
