"""The names of 0.2, and the rendezvous they find."""

import pytest

import torchelastic.rendezvous as rendezvous
from torchelastic.errors import ConfigError
from torchelastic.rendezvous import (
    RendezvousHandler,
    RendezvousHandlerFactory,
    RendezvousParameters,
    get_rendezvous_handler,
)


def parameters(backend="c10d"):
    return RendezvousParameters(backend, "node1:29400", "job-1", 1, 2)


def test_public_names():
    assert rendezvous.__all__ == [
        "RendezvousClosedException",
        "RendezvousException",
        "RendezvousHandler",
        "RendezvousHandlerCreator",
        "RendezvousHandlerFactory",
        "RendezvousNonRetryableError",
        "RendezvousParameters",
        "RendezvousTimeoutException",
        "create_handler",
        "get_rendezvous_handler",
        "register",
    ]
    for name in ("ClosedException", "NonRetryableError", "TimeoutException"):
        found = getattr(rendezvous, f"Rendezvous{name}")
        assert issubclass(found, rendezvous.RendezvousException)


@pytest.mark.parametrize("backend", ["c10d", "static", "etcd", "etcd-v2", "etcd-v3"])
def test_what_is_built_in_is_there_and_joins_nothing_yet(backend):
    params = parameters(backend)
    handler = get_rendezvous_handler(params)

    assert isinstance(handler, RendezvousHandler)
    assert handler.params is params
    assert (handler.get_backend(), handler.get_run_id()) == (backend, "job-1")
    assert (handler.is_closed(), handler.num_nodes_waiting()) == (False, 0)
    handler.set_closed()
    assert handler.shutdown() is True


def test_others_are_registered_once_each():
    factory = RendezvousHandlerFactory()
    factory.register("mine", lambda params: params.run_id)

    assert factory.create_handler(parameters("mine")) == "job-1"
    with pytest.raises(ConfigError, match="'mine' is already registered"):
        factory.register("mine", lambda params: None)
    with pytest.raises(ConfigError, match="needs a name"):
        factory.register("", lambda params: None)


def test_what_nobody_has_registered_is_refused():
    with pytest.raises(ConfigError, match=r"'zeus': use c10d, .* or etcd-v3"):
        get_rendezvous_handler(parameters("zeus"))
    with pytest.raises(ConfigError, match="'c10d' is not registered"):
        RendezvousHandlerFactory().create_handler(parameters())


def test_a_handler_need_not_define_shutdown():
    needed = RendezvousHandler.__abstractmethods__
    made = type("Mine", (RendezvousHandler,), dict.fromkeys(needed, lambda self: None))

    assert made().shutdown() is True
