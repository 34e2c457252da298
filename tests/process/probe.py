"""Prints, as JSON, everything a program can find out about how it was started."""

import builtins
import ctypes
import gc
import json
import locale
import multiprocessing
import os
import re
import resource
import signal
import site
import stat
import sys
import threading
import traceback


def main_module():
    return {
        "names": sorted(set(globals()) - {"torch", "annotations"}),
        "__name__": __name__,
        "__file__": __file__,
        "__spec__": [str(getattr(__spec__, name, None)) for name in ("name", "origin", "parent")],
        "__package__": repr(__package__),
        "__loader__": type(__loader__).__name__,
        "__cached__": repr(globals().get("__cached__")),
        "__builtins__": __builtins__ is builtins,
        "is __main__": sys.modules["__main__"].__dict__ is globals(),
        "is __mp_main__": sys.modules["__mp_main__"].__dict__ is globals(),
    }


def interpreter():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "path": sys.path,
        "flags": str(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "excepthook": sys.excepthook is sys.__excepthook__,
        "displayhook": sys.displayhook is sys.__displayhook__,
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "trace": repr((sys.gettrace(), sys.getprofile())),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "stack": [(frame.filename, frame.name) for frame in traceback.extract_stack()],
        "main thread": threading.current_thread() is threading.main_thread(),
        "threads": threading.active_count(),
        "site": [site.ENABLE_USER_SITE, site.PREFIXES],
        "sitecustomize": "sitecustomize" in sys.modules,
        "usercustomize": "usercustomize" in sys.modules,
        "locale": locale.setlocale(locale.LC_ALL),
        "multiprocessing": [
            multiprocessing.current_process().name,
            multiprocessing.current_process().daemon,
            repr(multiprocessing.parent_process()),
            multiprocessing.get_start_method(allow_none=True),
        ],
    }


def environment():
    """Ours from Python and from C, without the one variable that a worker has on top."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    found = {}
    for name in set(os.environ) - {"TORCHELASTIC_CHANNEL_FD"}:
        found[name] = [os.environ[name], (libc.getenv(name.encode()) or b"").decode()]
    return found


def signals():
    numbers = sorted(signal.valid_signals())
    return {
        "handlers": [repr(signal.getsignal(number)) for number in numbers],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "wakeup": signal.set_wakeup_fd(-1),
        "timers": [signal.getitimer(which) for which in (0, 1, 2)],
        "kernel": [caught(line) for line in status() if re.match("Sig(?!Q)", line)],
    }


def caught(line):
    """The line without the one signal that is ours: whoever looks for stacks sends it."""
    name, _, mask = line.partition(":\t")
    ours = 1 << (signal.SIGRTMIN + 8 - 1) if name == "SigCgt" else 0
    return f"{name} {int(mask, 16) & ~ours:x}"


def status():
    with open("/proc/self/status") as file:
        return file.read().splitlines()


def descriptors():
    """Open descriptors besides ours: number, kind, whether exec keeps it."""
    own = os.environ.get("TORCHELASTIC_CHANNEL_FD", "")
    found = {}
    for name in set(os.listdir("/proc/self/fd")) - {own}:
        try:
            if "torchelastic-stacks" in os.readlink(f"/proc/self/fd/{name}"):
                continue
            mode = stat.S_IFMT(os.fstat(int(name)).st_mode)
            found[name] = [oct(mode), os.get_inheritable(int(name))]
        except OSError:
            continue  # of the listing itself
    return found


def stream(which):
    return {
        "name": which.name,
        "mode": which.mode,
        "encoding": which.encoding,
        "errors": which.errors,
        "newlines": repr(which.newlines),
        "line buffering": which.line_buffering,
        "write through": which.write_through,
        "seekable": which.seekable(),
        "isatty": which.isatty(),
        "fileno": which.fileno(),
        "types": [type(which).__name__, type(which.buffer).__name__],
        "raw": repr(getattr(which.buffer, "raw", which.buffer)),
    }


def process():
    with open("/proc/self/cmdline", "rb") as file:
        command_line = file.read().decode()
    with open("/proc/self/comm") as file:
        name = file.read()
    mask = os.umask(0)
    os.umask(mask)
    return {
        "command line": command_line,
        "name": name,
        "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
        "directory": os.getcwd(),
        "umask": mask,
        "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
        "cpus": sorted(os.sched_getaffinity(0)),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "threads": [line for line in status() if line.startswith(("Threads", "NoNewPrivs"))],
        "subreaper": subreaper(),
    }


def subreaper():
    found = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(found), 0, 0, 0)
    return found.value


def look():
    facts = {
        "main module": main_module(),
        "interpreter": interpreter(),
        "environment": environment(),
        "signals": signals(),
        "descriptors": descriptors(),
        "stdin": [stream(sys.stdin), sys.stdin is sys.__stdin__, sys.stdin.read()],
        "stdout": [stream(sys.stdout), sys.stdout is sys.__stdout__],
        "stderr": [stream(sys.stderr), sys.stderr is sys.__stderr__],
        "process": process(),
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    look()
