"""The values of settings: their types, and a parser for each kind of text. Pure.

A parser raises `ConfigError` with a sentence that begins with the text; `flag.convert` adds the
name of the flag or variable in front.
"""

from __future__ import annotations

import enum
import math
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torchelastic.errors import ConfigError

T = TypeVar("T")

DEFAULT_PORT, DEFAULT_STATIC_PORT, DEFAULT_ETCD_PORT = 29400, 29500, 2379
#: Endpoint of an etcd that the only node of a job starts for itself.
OWN_ETCD = "localhost:0"
#: The dashboard uses its default port, or a free one.
PAGE_ANYWHERE = "auto"
#: The default port of the page; if it is taken, a free one.
PAGE_PORT = 29480
#: Object stores whose fsspec drivers create a key atomically; all others look, and then write.
WITNESS_SCHEMES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
#: Three names of one rendezvous, which always uses etcd's v3 API.
ETCD_BACKENDS = ("etcd", "etcd-v2", "etcd-v3")
#: Where an agent looks for preemption notices (`--preemption`).
PREEMPTION_SOURCES = ("auto", "none", "aws", "gcp", "azure", "kubernetes", "file")
#: Values of `--nproc-per-node` that stand for a number of devices.
DEVICE_WORDS = ("auto", "cpu", "gpu", "xpu")
#: Matches `[HOST:]PORT`, valid or not, and the word for any port, but no script.
PAGE = re.compile(rf"([^\s/]+:)?[0-9]+|{PAGE_ANYWHERE}")
_THOUSANDS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}
_CANNOT_BE_HANDLED = ("SIGKILL", "SIGSTOP")
# The words that torch accepts.
_TRUTH = {
    **dict.fromkeys(("1", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "f", "false", "n", "no"), False),
}


class Std(enum.IntFlag):
    """A set of a worker's two output streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_str(cls, text: str) -> Std | dict[int, Std]:
        """Parse `"3"` (every local rank) or `"0:1,11:3"` (some).

        >>> Std.from_str("0:1,11:3") == {0: Std.OUT, 11: Std.ALL}
        True
        """
        if re.fullmatch(r"[0-3]", text):
            return cls(int(text))
        if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            pairs = (item.split(":") for item in text.split(","))
            return {int(rank): cls(int(mask)) for rank, mask in pairs}
        raise ConfigError(
            f"'{text}' is not a valid set of streams: write 0, 1 (stdout), 2 (stderr) or 3 (both), "
            "or one per local rank, such as 0:1,1:3."
        )


@dataclass(frozen=True)
class Grow:
    """The rule for new nodes that join a running world (`--grow`)."""

    when: Literal["any", "every", "after-checkpoint"] = "any"
    seconds: float = 0.0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Grow:
        """Parse `any`, `every:SECONDS` or `after-checkpoint:PATH`."""
        kind, _, value = text.partition(":")
        if kind == "any" and not value:
            return cls()
        if kind == "every" and re.fullmatch(r"\d+(\.\d+)?", value) and float(value) > 0:
            return cls("every", seconds=float(value))
        if kind == "after-checkpoint" and value:
            return cls("after-checkpoint", path=value)
        raise ConfigError(
            f"'{text}' is not valid: write any, every:SECONDS or after-checkpoint:PATH."
        )

    def __str__(self) -> str:
        if self.when == "every":
            return f"every:{self.seconds:g}"
        if self.when == "after-checkpoint":
            return f"after-checkpoint:{self.path}"
        return "any"


@dataclass(frozen=True)
class WorldSizes:
    """The allowed numbers of workers in a world (`--world-sizes`); empty means any number."""

    allowed: tuple[int, ...] = ()
    multiple: int = 1

    @classmethod
    def parse(cls, text: str) -> WorldSizes:
        """Parse `1,2,4,8` or `multiple:K`."""
        if match := re.fullmatch(r"multiple:(\d+)", text):
            if int(match[1]) > 0:
                return cls(multiple=int(match[1]))
        elif re.fullmatch(r"\d+(,\d+)*", text):
            sizes = tuple(sorted({int(size) for size in text.split(",")}))
            if sizes[0] > 0:
                return cls(allowed=sizes)
        raise ConfigError(
            f"'{text}' is not a valid set of world sizes: list them, such as 1,2,4,8, or write "
            "multiple:K."
        )

    def allows(self, workers: int) -> bool:
        """Return True if a world may have this many workers."""
        return workers in self.allowed if self.allowed else workers % self.multiple == 0

    def __str__(self) -> str:
        if self.allowed:
            return ",".join(map(str, self.allowed))
        return f"multiple:{self.multiple}"


def std_for(streams: Std | Mapping[int, Std], local_rank: int) -> Std:
    """Return the streams of one local rank."""
    if isinstance(streams, int):  # torch's `Std` as well
        return Std(streams)
    return Std(streams.get(local_rank, Std.NONE))


def parse_truth(text: str) -> bool:
    """Parse a word for yes or no, as torch does.

    >>> parse_truth("1"), parse_truth("False")
    (True, False)
    """
    if text.lower() not in _TRUTH:
        raise ConfigError(f"'{text}' is neither yes nor no: write 1 or 0.")
    return _TRUTH[text.lower()]


def parse_preemption(text: str) -> tuple[tuple[str, str], ...]:
    """Parse `KIND`, `KIND=URL` and `file=PATH`, separated by commas, into kinds and the rest.

    >>> parse_preemption("aws,file=/run/leave")
    (('aws', ''), ('file', '/run/leave'))
    """
    return tuple(map(_preemption_source, text.split(",")))


def _preemption_source(text: str) -> tuple[str, str]:
    kind, _, where = text.partition("=")
    if kind not in PREEMPTION_SOURCES or (where and kind in ("auto", "none")):
        kinds = ", ".join(PREEMPTION_SOURCES[:-1])
        raise ConfigError(
            f"'{text}' is not a source of preemption notices: write {kinds} or file=PATH."
        )
    if kind == "file" and not where:
        raise ConfigError(f"'{text}' has no path: write file=PATH.")
    if where and kind != "file" and not where.startswith(("http://", "https://")):
        raise ConfigError(f"'{where}' is not a URL: write {kind}=http://HOST:PORT.")
    return kind, where if kind == "file" else where.rstrip("/")


def parse_nnodes(text: str) -> tuple[int, int]:
    """Parse `4` or `1:4`.

    >>> parse_nnodes("1:4")
    (1, 4)
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise ConfigError(
            f"'{text}' is not a valid range of nodes: write N or MIN:MAX with 1 <= MIN <= MAX."
        )
    return int(match[1]), int(match[2] or match[1])


def parse_shape(text: str) -> tuple[int, int, int]:
    """Parse `-j [MIN:]NODESxPROCS` into (min nodes, max nodes, workers per node).

    >>> parse_shape("1:4x8")
    (1, 4, 8)
    """
    match = re.fullmatch(r"(?:(\d+):)?(\d+)x(\d+)", text)
    if not match or not 1 <= int(match[1] or match[2]) <= int(match[2]) or int(match[3]) < 1:
        raise ConfigError(
            f"'{text}' is not a valid shape: write [MIN:]NODESxPROCS, such as 2x8 or 1:4x8."
        )
    return int(match[1] or match[2]), int(match[2]), int(match[3])


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Parse `host`, `host:port` or `[v6]:port` into (host, port).

    >>> parse_endpoint("[::1]:80"), parse_endpoint("node1")
    (('::1', 80), ('node1', 29400))
    """
    match = re.fullmatch(r"(?:\[([^\],]+)\]|([^:,\s]+))(?::(\d{1,5}))?", text.strip())
    if not match or int(match[3] or 0) > 65535:
        raise ConfigError(
            f"'{text}' is not a valid endpoint: write HOST[:PORT], such as node1:29400, with an "
            "IPv6 address in brackets, such as [fd00::1]:29400."
        )
    return match[1] or match[2], int(match[3]) if match[3] else default_port


def parse_endpoints(text: str, default_port: int = DEFAULT_PORT) -> tuple[tuple[str, int], ...]:
    """Parse comma-separated endpoints with `parse_endpoint`, without duplicates.

    >>> parse_endpoints("node1:80,[::1]")
    (('node1', 80), ('::1', 29400))
    """
    # No duplicates: a job starts with a majority of them.
    return tuple(dict.fromkeys(parse_endpoint(part, default_port) for part in text.split(",")))


def format_endpoint(host: str, port: int) -> str:
    """Return the text that `parse_endpoint` parses back.

    >>> format_endpoint("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def text(given: str) -> str:
    return given


def optional_text(given: str) -> str | None:
    return given or None


def whole(given: str) -> int:
    if re.fullmatch(r"[0-9]+", given):
        return int(given)
    raise ConfigError(f"'{given}' is not a valid number: write a whole number, 0 or more.")


def seconds(given: str, name: str = "") -> float:
    """Parse a time; an error names the setting that has it, if it is not a flag."""
    value = _number(given)
    if value is None or value < 0:
        where = f"{name}: " if name else ""
        raise ConfigError(
            f"{where}'{given}' is not a valid time: write a number of seconds, 0 or more."
        )
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
    import json  # not for the guard, which imports next to nothing

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
