"""Any process: the configuration of a job, each setting declared once.

launch_config  `LaunchConfig`: every setting as a field with its flag, default, help and variable
flag           the declaration of a flag, and who reads it
values         the types of values, and a parser for each kind of text

Nothing here reads the environment, touches the disk or starts anything.
"""

from torchelastic.config.launch_config import Entry, LaunchConfig, default_run_id
from torchelastic.config.values import (
    DEFAULT_ETCD_PORT,
    DEFAULT_PORT,
    DEFAULT_STATIC_PORT,
    ETCD_BACKENDS,
    OWN_ETCD,
    PAGE_ANYWHERE,
    PAGE_PORT,
    WITNESS_SCHEMES,
    Grow,
    Std,
    WorldSizes,
    format_endpoint,
    parse_endpoint,
    parse_endpoints,
    parse_nnodes,
    parse_preemption,
    parse_shape,
    parse_truth,
    std_for,
)

__all__ = [
    "DEFAULT_ETCD_PORT",
    "DEFAULT_PORT",
    "DEFAULT_STATIC_PORT",
    "ETCD_BACKENDS",
    "OWN_ETCD",
    "PAGE_ANYWHERE",
    "PAGE_PORT",
    "WITNESS_SCHEMES",
    "Entry",
    "Grow",
    "LaunchConfig",
    "Std",
    "WorldSizes",
    "default_run_id",
    "format_endpoint",
    "parse_endpoint",
    "parse_endpoints",
    "parse_nnodes",
    "parse_preemption",
    "parse_shape",
    "parse_truth",
    "std_for",
]
