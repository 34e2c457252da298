"""A cgroup (version 2) for the workers of an agent, where the kernel lets us make one.

It ends a whole tree at once, faster than the tree can fork. It is an extra: without it the
subreaper still finds everything. Each worker has a cgroup of its own in it, named by its pid.

Its name identifies the agent, so that the guard can clean up after a killed one:
`torchelastic-<agent's pid>-<its start time>-<random>`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time

from torchelastic.system import linux

logger = logging.getLogger(__name__)


class Cgroup:
    """A cgroup of ours, without controllers: it limits nothing."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def create(cls) -> Cgroup | None:
        """Create one below this process's own; None if that is not allowed."""
        home = own_directory()
        if home is None:
            logger.debug("no cgroup for the workers: this process is in no version 2 cgroup")
            return None
        made = cls(os.path.join(home, f"{prefix_of(os.getpid())}{os.urandom(4).hex()}"))
        try:
            os.mkdir(made.path)
        except OSError as error:
            logger.debug("no cgroup for the workers: %s", error)
            return None
        if not made._admits():
            logger.debug("no cgroup for the workers: %s admits no process", made.path)
            made.remove()
            return None
        return made

    def _admits(self) -> bool:
        """True if a process may move in: even a directory we created may refuse that."""
        pid = os.fork()
        if pid == 0:
            try:
                self.join()
            except OSError:
                os._exit(1)
            os._exit(0)
        admitted = os.waitpid(pid, 0)[1] == 0
        self.of(pid).remove()
        return admitted

    def of(self, pid: int) -> Cgroup:
        """The cgroup that a process made in here when it joined."""
        return Cgroup(os.path.join(self.path, str(pid)))

    def join(self) -> None:
        """Move the calling process into a cgroup of its own in here.

        Moving can take the kernel 10 ms; once is enough, so a process may ask again.
        """
        own = self.of(os.getpid())
        if own_directory() != own.path:
            with contextlib.suppress(FileExistsError):  # of a process that had the same pid
                os.mkdir(own.path)
            _write(os.path.join(own.path, "cgroup.procs"), "0")

    def processes(self) -> list[int]:
        """Everything inside, however deep."""
        found = []
        for directory, _, _ in os.walk(self.path):
            try:
                with open(os.path.join(directory, "cgroup.procs"), encoding="ascii") as file:
                    found += [int(line) for line in file]
            except OSError:
                continue  # it is gone, or going
        return found

    def kill(self) -> None:
        """SIGKILL to everything inside."""
        try:
            _write(os.path.join(self.path, "cgroup.kill"), "1")
        except OSError:  # a kernel before 5.14 has no such file
            for pid in self.processes():
                _kill(pid)

    def remove(self, timeout: float = 2.0) -> bool:
        """Kill what is inside and delete the directory; False if something inside does not die."""
        deadline = time.monotonic() + timeout
        while True:
            self.kill()
            for directory, _, _ in os.walk(self.path, topdown=False):
                with contextlib.suppress(OSError):  # busy: what we killed is not quite gone
                    os.rmdir(directory)
            if not os.path.exists(self.path):
                return True
            if time.monotonic() > deadline:
                logger.warning("a process in %s did not die after SIGKILL", self.path)
                return False
            time.sleep(0.001)


def remove_all(prefix: str) -> None:
    """Kill and remove the cgroups with this name prefix, after their agent has ended."""
    home = own_directory()
    if home is None or not os.access(home, os.R_OK | os.W_OK):
        return
    for name in os.listdir(home):
        if name.startswith(prefix):
            Cgroup(os.path.join(home, name)).remove()


def prefix_of(agent: int) -> str:
    """The name prefix of an agent's cgroups; call it before the agent is reaped."""
    return f"torchelastic-{agent}-{linux.start_time(agent)}-"


def own_directory(controller: str = "") -> str | None:
    """The directory of this process's cgroup: version 2, or a controller's version 1 tree."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            own = find_own(file.read(), controller)
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            return find_directory(own, file.read(), controller)
    except FileNotFoundError:
        return None


def find_own(text: str, controller: str = "") -> str | None:
    """The cgroup of a process, from the text of /proc/PID/cgroup.

    >>> find_own("4:cpu,memory:/job\\n0::/", "memory"), find_own("4:cpu,memory:/job\\n0::/")
    ('/job', '/')
    """
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and (bool(controller) or number == "0"):
            return path
    return None


def find_directory(own: str | None, mountinfo: str, controller: str = "") -> str | None:
    """The directory of cgroup `own`, given the mounts of the machine.

    >>> find_directory("/job/7", "31 23 0:28 /job /cg rw,relatime - cgroup2 cgroup2 rw")
    '/cg/7'
    """
    if own is None or own.startswith("/.."):  # outside our cgroup namespace
        return None
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        root, place = mount.split(" ")[3:5]
        kind, _, options = source.split(" ", 2)
        right = controller in options.split(",") if controller else kind == "cgroup2"
        if kind.startswith("cgroup") and right and (own + "/").startswith(root.rstrip("/") + "/"):
            return os.path.normpath(f"{_unescaped(place)}/{os.path.relpath(own, root)}")
    return None


def _unescaped(path: str) -> str:
    """`/a b` for what mountinfo writes as `/a\\040b`."""
    return path.encode().decode("unicode_escape").encode("latin-1").decode()


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended meanwhile, which is what we want
