"""A store for each generation, and none longer than it is of use."""

import socket

import pytest

from torchelastic.rendezvous.world import World
from torchelastic.worker.worker_stores import OwnStores


@pytest.fixture
def stores():
    made = OwnStores()
    yield made
    made.close()


def begins(stores, generation, port, *, offered=None, after=None):
    """A world begins at the store with this port."""
    world = World(generation=generation, phase="running", store=f"here:{port}", after=after)
    return stores.begins(world, f"here:{offered or port}")


def is_there(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_no_two_generations_meet_at_one_store(stores):
    first = stores.offer()
    assert begins(stores, 0, first)
    second = stores.offer()
    assert second != first
    assert not begins(stores, 0, first, offered=second)  # the same world, told again
    assert is_there(first)


def test_untaken_store_stays_offered_until_close(stores):
    port = stores.offer()
    assert not begins(stores, 0, 1, offered=port)
    assert begins(stores, 1, port)
    assert is_there(port)
    stores.close()
    assert not is_there(port)


@pytest.mark.parametrize(("after", "kept"), [(None, 1), (7, 2)], ids=["at once", "after a step"])
def test_a_store_goes_with_its_generation_or_after_the_last_step_of_it(stores, after, kept):
    begins(stores, 0, stores.offer())
    begins(stores, 1, stores.offer(), after=after)
    assert len(stores._stores) == kept
