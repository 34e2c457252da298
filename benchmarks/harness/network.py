"""Networks of this machine alone: one without the world, and a cable that can be cut unseen."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time

from benchmarks.harness.job import Place

ADDRESSES = ("10.213.77.1", "10.213.77.2")
#: Nobody has this address: frames sent to it arrive and are dropped, and no answer comes.
_NOBODY = "02:00:00:00:00:01"


_CLONE_NEWNET = 0x40000000


def isolate() -> bool:
    """Leave this process, and all that it starts from here on, a loopback interface and no more.

    torch's store asks the name service about each of its clients, one after the other: where that
    takes its time, nothing else would be measured. False if it cannot be done, as by any but root.
    """
    if not Network.available() or ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0:
        return False
    Network._ip("link", "set", "lo", "up")
    return True


class Network:
    """Two places for nodes: this namespace and one beside it. Needs root and the `ip` command."""

    def __init__(self) -> None:
        self._beside = f"bench-{os.getpid()}"
        self._ends = (f"bench{os.getpid()}a", f"bench{os.getpid()}b")
        exec_beside = ("ip", "netns", "exec", self._beside)
        self.places = [
            Place(prefix, ("--local-addr", address), {"GLOO_SOCKET_IFNAME": end})
            for prefix, address, end in zip(((), exec_beside), ADDRESSES, self._ends, strict=True)
        ]

    @staticmethod
    def available() -> bool:
        return os.geteuid() == 0 and shutil.which("ip") is not None

    def __enter__(self) -> Network:
        here, beside = self._ends
        self._ip("netns", "add", self._beside)
        self._ip("link", "add", here, "type", "veth", "peer", beside, "netns", self._beside)
        for end, address, where in self._sides():
            self._ip(*where, "addr", "add", f"{address}/30", "dev", end)
            self._ip(*where, "link", "set", end, "up")
        self._ip("-n", self._beside, "link", "set", "lo", "up")
        return self

    def __exit__(self, *exc: object) -> None:
        self._ip("netns", "del", self._beside)  # and with it both ends of the cable

    def cut(self) -> float:
        """Both sides send to nobody from now on: packets vanish, links stay up, no reset comes.

        Returns the time from which nothing arrived here any more; each command takes some.
        """
        silent = []
        for (end, _, where), other in zip(self._sides()[::-1], ADDRESSES, strict=True):
            neighbour = [other, "lladdr", _NOBODY, "dev", end, "nud", "permanent"]
            self._ip(*where, "neigh", "replace", *neighbour)
            silent.append(time.monotonic())
        return silent[0]

    def heal(self) -> None:
        for (end, _, where), other in zip(self._sides(), reversed(ADDRESSES), strict=True):
            self._ip(*where, "neigh", "flush", "to", other, "dev", end, "nud", "all")

    def _sides(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Each end of the cable, its address, and what `ip` needs to be told to reach it."""
        here, beside = self._ends
        return [
            (here, ADDRESSES[0], ()),
            (beside, ADDRESSES[1], ("-n", self._beside)),
        ]

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)
