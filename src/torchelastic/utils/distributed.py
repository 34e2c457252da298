"""A module name of 0.2's."""

from torchelastic.compat.release02.utilities import (
    create_c10d_store,
    get_free_port,
    get_socket_with_port,
)

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]
