"""Every module path and name of 0.1, 0.2 and torch's launcher."""

import importlib
import logging
import re

import pytest
import torch.distributed as dist

from torchelastic import events
from torchelastic.compat.old_names import DIFFERENT, OLD_NAMES, PATHS, REFUSED, REFUSED_CLASSES
from torchelastic.compat.rendezvous_api import AgentRendezvousHandler
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
from torchelastic.rendezvous.parameters import RendezvousParameters as RendezvousParameters01
from torchelastic.rendezvous.parameters import get_rendezvous
from torchelastic.utils.store import barrier, get_all, synchronize

#: Names of torch's launcher, besides those of 0.1 and 0.2.
OF_TORCH = {
    "distributed.run": "config_from_args determine_local_world_size get_args_parser main "
    "parse_args parse_min_max_nnodes run",
    "distributed.launch": "launch main parse_args",
    "launcher": "LaunchConfig elastic_launch launch_agent",
    "launcher.api": "LaunchConfig elastic_launch launch_agent",
    "rendezvous.api": "RendezvousError RendezvousClosedError RendezvousTimeoutError "
    "RendezvousConnectionError",
    "rendezvous.utils": "parse_rendezvous_endpoint",
    "timer": "FileTimerClient FileTimerServer FileTimerRequest",
    "timer.file_based_local_timer": "FileTimerClient FileTimerServer FileTimerRequest",
}
NAMES = [
    (path, name)
    for path, names in [*((path, it[1]) for path, it in OLD_NAMES.items()), *OF_TORCH.items()]
    for name in names.split()
]


def get(path, name):
    module = importlib.import_module(f"torchelastic.{path}" if path else "torchelastic")
    return getattr(module, name)


def test_every_name_of_earlier_releases_is_there_or_refused_with_its_sentence():
    gone = set(REFUSED) - set(REFUSED_CLASSES)
    for path, name in NAMES:
        if name in gone:
            with pytest.raises(ImportError, match=f"^{re.escape(REFUSED[name])}$"):
                get(path, name)
        else:
            assert get(path, name) is not None, (path, name)
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from torchelastic.agent.server.api import Nothing  # noqa: F401


def test_tables_of_old_names_have_no_entry_too_many():
    plain = {name for _, name in NAMES}
    qualified = {f"{path}.{name}" for path, name in NAMES}
    assert {*REFUSED, *DIFFERENT} <= plain | qualified
    assert set(DIFFERENT) & set(REFUSED) == set()
    listed = set(OLD_NAMES) | set(OF_TORCH)
    assert set(PATHS.split()) <= listed


def test_a_train_step_becomes_a_generator():
    left = [1, 2]

    def train_step(state):
        if not left:
            raise StopIteration
        return state, left.pop()

    steps = importlib.import_module("torchelastic.training.train").to_generator(train_step)
    assert list(steps("state")) == [("state", 2), ("state", 1)]


def test_subclass_of_simple_elastic_agent_is_refused():
    from torchelastic.agent.server import LocalElasticAgent, SimpleElasticAgent

    class Mine(SimpleElasticAgent):
        def run(self, role="default"): ...

        def get_worker_group(self, role="default"): ...

    with pytest.raises(ConfigError, match=r"^A subclass of SimpleElasticAgent cannot start"):
        Mine(None)
    assert issubclass(LocalElasticAgent, SimpleElasticAgent)


def test_rendezvous_at_etcd_takes_parameters_only():
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


def test_ranks_exchange_data_through_a_store():
    store = dist.HashStore()
    store.set("x/1", "b")
    assert synchronize(store, b"a", 0, 2, "x/", barrier_timeout=5) == [b"a", b"b"]
    assert get_all(store, "x/", 2) == [b"a", b"b"]
    store.set("y/1", "1")
    barrier(store, 0, 2, "y/", barrier_timeout=5)
    with pytest.raises(dist.DistStoreError):
        barrier(store, 0, 2, "z/", barrier_timeout=0.01)


def test_a_rendezvous_of_release_01_has_its_keys_in_one_text():
    params = RendezvousParameters01("etcd", "n1:2379", "job", 1, 2, "timeout=60,protocol=https")
    handler = get_rendezvous(params)
    assert isinstance(handler, AgentRendezvousHandler)
    assert (params.min_nodes, params.timeout, params.get("protocol")) == (1, 60, "https")

    urls = []
    dist.register_rendezvous_handler("mine", lambda url, **_: urls.append(url) or "made")
    assert get_rendezvous(RendezvousParameters01("mine", "n1:1", "job", 1, 2, "a=/b")) == "made"
    assert urls == ["mine://n1:1/job?min_workers=1&max_workers=2&a=/b"]


def test_torchs_handler_of_events_is_found():
    assert isinstance(events.get_logging_handler("null"), logging.NullHandler)


def test_a_config_is_the_same_wherever_it_comes_from():
    from torchelastic import LaunchConfig as public

    assert public is LaunchConfig
