"""The memory that snapshots may use, and the error that refuses more.

Memory of a memfd counts against the cgroup of the process that allocates it. At the limit the
kernel kills instead of refusing, so this checks first. A cgroup's limit includes all groups below
it, so the parents are checked, too. Inactive file cache, which the kernel can drop, is free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

#: The fraction of every limit that stays free: training may need more than now.
RESERVE = 0.05
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Limit:
    """A memory limit in one place, and the memory in use."""

    #: The name of the place, for people.
    place: str
    most: int
    used: int

    @property
    def left(self) -> int:
        """The bytes that are still free."""
        return max(int(self.most * (1 - RESERVE)) - self.used, 0)


class NoRoom(Exception):
    """There is not enough memory; the message says why and what to do."""


def check(
    needed: int, what: str, otherwise: str = "continue without snapshots", *, promised: int = 0
) -> None:
    """Raise `NoRoom` if `needed` bytes, in addition to those `promised` to others, would come too
    close to a limit of this process."""
    then = [replace(limit, used=limit.used + promised) for limit in limits()]
    sentence = refusal(needed, then, what, otherwise)
    if sentence is not None:
        raise NoRoom(sentence)


def refusal(
    needed: int, limits: list[Limit], what: str, otherwise: str = "continue without snapshots"
) -> str | None:
    """The message if `needed` bytes are not free; None: they are.

    >>> refusal(2 << 30, [Limit("this machine", 4 << 30, 3 << 30)], "snapshots of 'shared'")[:75]
    "No room for snapshots of 'shared': they need 2.0 GiB of memory, and 0.8 GiB"
    """
    tightest = min(limits, key=lambda limit: limit.left, default=None)
    if tightest is None or needed <= tightest.left:
        return None
    return (
        f"No room for {what}: they need {in_words(needed)} of memory, and "
        f"{in_words(tightest.left)} of the {in_words(tightest.most)} of {tightest.place} are free; "
        f"give the node more memory, keep less state, or {otherwise}."
    )


def in_words(size: int) -> str:
    """Format a number of bytes.

    >>> in_words(3 * 512), in_words(5 << 40)
    ('1.5 KiB', '5.0 TiB')
    """
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    # 1.0 GiB reads better than 1000.0 MiB.
    if power + 1 < len(_UNITS) and size >= 800 << (10 * power):
        power += 1
    return f"{size / (1 << 10 * power):.1f} {_UNITS[power]}"


# --- what the machine says -----------------------------------------------------------------------


def limits() -> list[Limit]:
    """All memory limits of this process."""
    found = _of_machine(_read("/proc/meminfo"))
    own, mounts = _read("/proc/self/cgroup"), _read("/proc/self/mountinfo")
    for directory, is_v2 in directories(own, mounts):
        names = _V2 if is_v2 else _V1
        limit = of_cgroup({name: _read(os.path.join(directory, name)) for name in names}, is_v2)
        if limit is not None:
            found.append(limit)
    return found


_V2 = ("memory.max", "memory.current", "memory.stat")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")


def _read(path: str) -> str:
    """Empty if the file is missing: the root has no limit, and a parent may be hidden."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _of_machine(meminfo: str) -> list[Limit]:
    sizes = _numbers(meminfo.replace(":", " "))
    total, available = sizes.get("MemTotal", 0) << 10, sizes.get("MemAvailable", 0) << 10
    return [Limit("this machine", total, total - available)] if total and available else []


def of_cgroup(files: Mapping[str, str], is_v2: bool) -> Limit | None:
    """The limit in the files of a cgroup; None: it has none.

    >>> files = {"memory.max": "1000", "memory.current": "700", "memory.stat": "inactive_file 200"}
    >>> of_cgroup(files, is_v2=True)
    Limit(place='its cgroup', most=1000, used=500)
    """
    most, used, stat = (files[name].strip() for name in (_V2 if is_v2 else _V1))
    # Version 1 shows a huge number if there is no limit.
    if not (most.isdigit() and used.isdigit()) or int(most) >= 1 << 60:
        return None
    idle = _numbers(stat).get("inactive_file" if is_v2 else "total_inactive_file", 0)
    return Limit("its cgroup", int(most), max(int(used) - idle, 0))


def _numbers(text: str) -> dict[str, int]:
    words = [line.split() for line in text.splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) >= 2 and line[1].isdigit()}


def directories(own: str, mountinfo: str) -> list[tuple[str, bool]]:
    """The directories of this process's memory cgroup and of all its parents, nearest first, and
    whether they are version 2.

    `own` and `mountinfo` are the contents of /proc/self/cgroup and /proc/self/mountinfo.

    >>> directories("0::/a/b", "31 23 0:28 / /cg rw - cgroup2 cgroup2 rw")
    [('/cg/a/b', True), ('/cg/a', True), ('/cg', True)]
    """
    found: list[tuple[str, bool]] = []
    for line in own.splitlines():
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0"
        if is_v2 or "memory" in controllers.split(","):
            found += [(place, is_v2) for place in _upwards(path, mountinfo, is_v2)]
    return found


def _upwards(path: str, mountinfo: str, is_v2: bool) -> list[str]:
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        words, kind = mount.split(" "), source.split(" ")
        if len(words) < 5 or len(kind) < 3:
            continue
        fits = kind[0] == "cgroup2" if is_v2 else "memory" in kind[2].split(",")
        if not fits or not kind[0].startswith("cgroup"):
            continue
        root, place = words[3].rstrip("/"), words[4]
        # In a container the mount may start at our own cgroup, with the host's path.
        inside = path[len(root) :] if (path + "/").startswith(root + "/") else "/"
        parts = inside.strip("/").split("/") if inside.strip("/") else []
        return [os.path.join(place, *parts[:end]) for end in range(len(parts), -1, -1)]
    return []
