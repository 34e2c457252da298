"""Converters for the values of flags and variables: one small function per kind of value.

Each raises `ConfigError` with a sentence that begins with the text; the parser adds the name of the
flag or variable in front.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Callable
from typing import TypeVar

from torchelastic.config import (
    PAGE_ANYWHERE,
    format_endpoint,
    parse_endpoint,
    parse_endpoints,
    parse_preemption,
)
from torchelastic.errors import ConfigError
from torchelastic.hosts.host_list import HostSlots, parse_hosts

T = TypeVar("T")

#: Values of `--nproc-per-node` that stand for a number of devices.
DEVICE_WORDS = ("auto", "cpu", "gpu", "xpu")
_THOUSANDS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}
#: Matches `[HOST:]PORT`, valid or not, and the word for any port, but no script.
PAGE = re.compile(rf"([^\s/]+:)?[0-9]+|{PAGE_ANYWHERE}")
_CANNOT_BE_HANDLED = ("SIGKILL", "SIGSTOP")


def text(given: str) -> str:
    return given


def optional_text(given: str) -> str | None:
    return given or None


def whole(given: str) -> int:
    if re.fullmatch(r"[0-9]+", given):
        return int(given)
    raise ConfigError(f"'{given}' is not a valid number: write a whole number, 0 or more.")


def seconds(given: str) -> float:
    value = _number(given)
    if value is None or value < 0:
        raise ConfigError(f"'{given}' is not a valid time: write a number of seconds, 0 or more.")
    return value


def positive_seconds(given: str) -> float:
    value = _number(given)
    if value is None or value <= 0:
        raise ConfigError(f"'{given}' is not a valid time: write a number of seconds above 0.")
    return value


def progress_timeout(given: str) -> float | None:
    """Return the limit in seconds; None: learned; 0: no limit."""
    if given in ("auto", "off"):
        return None if given == "auto" else 0.0
    value = _number(given)
    if value is None or value <= 0:
        raise ConfigError(f"'{given}' is not a valid time: write seconds above 0, auto or off.")
    return value


def factor(given: str) -> float:
    """Return the factor; 0: off."""
    value = _number(given)
    if value is None or 0 < value <= 1 or value < 0:
        raise ConfigError(f"'{given}' is not a valid factor: write a number above 1, or 0.")
    return value


def rate(given: str) -> float:
    """Return bytes per second; K, M and G are powers of 1000.

    >>> rate("200M"), rate("0")
    (200000000.0, 0.0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKMG]?)", given)
    if not match:
        raise ConfigError(
            f"'{given}' is not a valid rate: write bytes per second, such as 200M or 2G, or 0."
        )
    return float(match[1]) * _THOUSANDS[match[2].upper()]


def quorum(given: str) -> str:
    if given not in ("majority", "none"):
        raise ConfigError(f"'{given}' is not a valid quorum: write majority or none.")
    return given


def hosts(given: str) -> tuple[HostSlots, ...]:
    return parse_hosts(given.split(","))


def preemption(given: str) -> str:
    parse_preemption(given)
    return given


def _number(given: str) -> float | None:
    try:
        value = float(given)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def port(given: str) -> int | None:
    if not given:
        return None
    if re.fullmatch(r"[0-9]+", given) and int(given) <= 65535:
        return int(given)
    raise ConfigError(f"'{given}' is not a valid port: write a number from 1 to 65535.")


def workers(given: str) -> int | str:
    """Return a number of workers, or the kind of device to count."""
    if given in DEVICE_WORDS:
        return given
    if re.fullmatch(r"[0-9]+", given) and int(given) > 0:
        return int(given)
    raise ConfigError(
        f"'{given}' is not a valid number of workers: write 1 or more, auto, cpu, gpu or xpu."
    )


def endpoint(given: str) -> str:
    """Check the endpoint and return it as given: the default port depends on the rendezvous."""
    if given:
        parse_endpoints(given)
    return given


def listening(given: str) -> str:
    """Return the address to listen at; a port alone means loopback.

    >>> listening("9400"), listening("node1:9400"), listening("")
    ('127.0.0.1:9400', 'node1:9400', '')
    """
    if re.fullmatch(r"[0-9]{1,5}", given):
        given = f"127.0.0.1:{given}"
    if given:
        name, number = parse_endpoint(given, -1)
        if number < 0:
            raise ConfigError(f"'{given}' has no port: write PORT or HOST:PORT.")
        return format_endpoint(name, number)
    return given


def page(given: str) -> str:
    """Return the dashboard's address: `auto`, or as in `listening`."""
    return given if given == PAGE_ANYWHERE else listening(given)


def host(given: str) -> str:
    """Return a host name or an address; IPv6 may have brackets."""
    bare = given.strip().removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[^:\s\[\]]+|[0-9a-fA-F]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*(%\w+)?", bare):
        raise ConfigError(
            f"'{given}' is not a valid host: write a name or an address, without a port."
        )
    return bare


def key_values(given: str) -> dict[str, str]:
    """Parse `key=value,key=value`; all of it or each part may be quoted.

    >>> key_values("'timeout=5,is_host=\"1\"'")
    {'timeout': '5', 'is_host': '1'}
    """
    found: dict[str, str] = {}
    for item in filter(None, _unquoted(given).split(",")):
        key, _, value = (_unquoted(part) for part in _unquoted(item).partition("="))
        if not key or not value:
            raise ConfigError(f"'{given}' is not valid: write KEY=VALUE,KEY=VALUE.")
        found[key] = value
    return found


def _unquoted(given: str) -> str:
    return re.sub(r"""^(['"])((?:(?!\1).)*)\1$""", r"\2", given.strip()).strip()


def words(given: str) -> tuple[str, ...]:
    """Split `a,b` into (a, b); a doubled comma stands for a comma."""
    if not given:
        return ()
    placeholder = "\0"
    items = given.replace(",,", placeholder).split(",")
    return tuple(item.replace(placeholder, ",") for item in items)


def amount(given: str) -> float:
    value = _number(given)
    if value is None or value < 0:
        raise ConfigError(f"'{given}' is not a valid amount: write a number, 0 or more.")
    return value


def resources(given: str) -> dict[str, float]:
    """Return amounts by name, from JSON as `ray start --resources` takes it."""
    try:
        found = json.loads(given)
        return {name: amount(str(value)) for name, value in found.items()}
    except (ValueError, AttributeError):
        raise ConfigError(
            f"'{given}' is not a set of resources: write JSON, such as {{\"rack\": 1}}."
        ) from None


def texts(given: str) -> tuple[str, ...]:
    """Return the values of a flag that can be repeated."""
    return (given,) if given else ()


def modules(given: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"'{name}' is not a valid module name: write names such as numpy,my.package."
            )
    return names


def local_ranks(given: str) -> frozenset[int] | None:
    if not given:
        return None
    if re.fullmatch(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*", given):
        return frozenset(int(rank) for rank in given.split(","))
    raise ConfigError(f"'{given}' is not a list of local ranks: write numbers such as 0,1,2.")


def ranks(given: str) -> frozenset[int]:
    """`0,2-3` -> {0, 2, 3}."""
    found: set[int] = set()
    for part in given.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:\s*-\s*(\d{1,7}))?\s*", part, re.ASCII)
        if match is None:
            raise ConfigError(f"'{given}' is not a list of ranks: write it as in 0,2-3.")
        first, last = int(match[1]), int(match[2] or match[1])
        found |= set(range(first, last + 1))
    return frozenset(found)


def signals(given: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in given.split(","))
    for name in names:
        if name not in signal.Signals.__members__ or name in _CANNOT_BE_HANDLED:
            raise ConfigError(
                f"'{name}' is not a signal that can be handled: write names such as "
                "SIGTERM,SIGUSR1."
            )
    return names


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a converter that accepts one of these words."""

    def choose(given: str) -> str:
        if given in choices:
            return given
        *others, last = choices
        listed = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"'{given}' is not a valid choice: write {listed}.")

    return choose


def optional(convert: Callable[[str], T]) -> Callable[[str], T | None]:
    """Return `convert`, extended to give None for an empty text."""
    return lambda given: convert(given) if given else None
