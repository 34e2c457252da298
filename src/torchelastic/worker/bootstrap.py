"""The code around the user's code in a worker: report failures, call functions."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torchelastic import env
from torchelastic.worker import (
    channel,
    error_file,
    handed_secret,
    optimizer_steps,
    stack_dump,
    store_sockets,
)
from torchelastic.worker_counters import milestones

#: The most characters of a message and of a traceback that the agent gets, at most 12 bytes each
#: in JSON; the error file has everything.
TOLD_MESSAGE, TOLD_TRACEBACK = 2000, 8000


#: Seconds that a worker may take to end after an unhandled exception.
EXIT_TIMEOUT = 60


def attach() -> None:
    """Report unhandled exceptions to the agent from now on. Called before the user's code.

    Uses an audit hook, because a program may replace `sys.excepthook`, or check that it was not
    replaced.
    """
    channel.adopt()
    handed_secret.adopt()
    stack_dump.adopt()
    # The timeout: the agent may be busy.
    milestones.listen(partial(channel.send, timeout=1.0))
    worker = os.getpid()
    raised: list[type[BaseException]] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        # No frame below us: the interpreter is about to end, not a C extension printing an error.
        if event == "import":
            if args[0] == "torch":
                ignore_missing_numpy()
            optimizer_steps.look()
            store_sockets.look()
        elif event == "sys.excepthook" and os.getpid() == worker and _at_the_bottom():
            raised.append(type(args[2]))
            report(args[2], args[3])
            _end_soon()
            if _is_said_in_one_line(args[2], args[0]):
                raise _SaidInOneLine

    optimizer_steps.attach()
    store_sockets.attach()
    sys.addaudithook(watch)
    # Unlike `atexit`, before Python waits for threads and runs what others have registered.
    threading._register_atexit(_returned, worker, raised)  # type: ignore[attr-defined]


def ignore_missing_numpy() -> None:
    """Keep torch from warning in every worker that numpy is not installed: torch works without."""
    import warnings  # not before torch is imported, which needs it, too

    warnings.filterwarnings("ignore", r"Failed to initialize NumPy: No module named 'numpy'")


def _returned(worker: int, raised: Sequence[type[BaseException]]) -> None:
    """Tell the agent that the program has returned (`orders.Returned`)."""
    if os.getpid() == worker and not raised:  # not a process that multiprocessing has forked
        try:
            milestones.ended()
        finally:
            # Import nothing: Python would forget that it ends by SIGINT.
            channel.send({"type": "returned"}, timeout=1.0)


def _end_soon() -> None:
    """Have the kernel end this process if its exit handlers and destructors do not end.

    The agent sees a failure when the process ends, and all other ranks wait for that. No thread is
    needed: that none can be started may be the error.
    """
    import signal

    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_TIMEOUT)
    except ValueError:  # not the main thread
        return


class _SaidInOneLine(RuntimeError):
    """Raised by the audit hook, it keeps Python from printing the traceback."""


def _is_said_in_one_line(error: BaseException, hook: Any) -> bool:
    """Print one line and return True if the traceback tells nothing new.

    An earlier generation printed the same one, or it only says that a peer is gone: then the
    traceback of the peer is what to read. A custom hook still gets the error.
    """
    # Not for an interrupt: Python forgets that it ends by SIGINT when what is imported calls exec.
    if isinstance(error, KeyboardInterrupt):
        return False
    from torchelastic.events import failure  # not before they are needed
    from torchelastic.worker import repeated_error

    try:
        rank = ""
        if getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
            from torchelastic import torch_private

            hook, rank = torch_private.excepthook_below(hook), f"[rank{env.get('RANK')}]: "
        if hook is not sys.__excepthook__:
            return False
        path, message = env.get("TORCHELASTIC_ERROR_FILE", ""), _one_line(error)
        line = message.partition("\n")[0]
        if failure.says_peer_gone(message) and error_file.read(path):
            # gloo's next sentences are advice.
            said, line = f"{failure.CONSEQUENCE} {path}", line.partition(". ")[0]
        else:
            said = repeated_error.sentence(path)
        if said:  # in one piece: other ranks write to the same place
            sys.stderr.write(f"{rank}{line} ({said})\n")
        return bool(said)
    except Exception:  # then Python prints it all
        return False


def _at_the_bottom() -> bool:
    hook = sys._getframe(1)
    return hook.f_back is None


def report(error: BaseException, where: TracebackType | None) -> None:
    """Write the error file and report to the agent; never raises."""
    import traceback  # not before it is needed: a worker starts without it

    text = "".join(traceback.format_exception(type(error), error, where))
    message = _one_line(error)
    path = env.get("TORCHELASTIC_ERROR_FILE")
    try:
        if path:
            error_file.write(path, message, text)
    except OSError as problem:
        print(f"torchelastic: could not write {path}: {problem}", file=sys.stderr)
    channel.send(
        {
            "type": "failure",
            "message": message[:TOLD_MESSAGE],
            "traceback": text[-TOLD_TRACEBACK:],
            "place": error_file.user_frame(text),
        },
        timeout=1.0,
    )


def _one_line(error: BaseException) -> str:
    """`RuntimeError: boom`, as torch writes it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the user's own __str__ failed
        return f"{type(error).__name__}: <unprintable>"


def write_call(
    path: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    dumps: Callable[[Any], bytes] = pickle.dumps,
) -> None:
    """Pickle a call for `run_call` in another process, also of a function in `__main__`."""
    from multiprocessing import spawn

    preparation = spawn.get_preparation_data("MainProcess")
    del preparation["authkey"]  # a secret, and of no use to a worker
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        # Two pickles: the second can be read only after the first has prepared the process.
        pickle.dump(preparation, file)
        file.write(dumps((function, tuple(args))))


def run_call(path: str) -> None:
    """Make the call in file `path` and pickle its result to `result_path`."""
    function, args = _read_call(path)
    result = function(*args)
    generation = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    target = result_path(path, generation, int(env.get("RANK", "0")))
    with open(f"{target}.part", "wb") as file:
        pickle.dump(result, file)
    os.replace(f"{target}.part", target)


def _read_call(path: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Prepare the process as multiprocessing's spawn does, which imports the caller's script.

    During the import the process is marked: a script without `if __name__ == "__main__"` then gets
    an error instead of launching its job again from every worker, without end.
    """
    from multiprocessing import process, spawn

    current: Any = process.current_process()
    with open(path, "rb") as file:
        current._inheriting = True
        try:
            spawn.prepare(pickle.load(file))
            function, args = pickle.load(file)
        finally:
            del current._inheriting
    return function, args


def result_path(call: str, generation: int, rank: int) -> str:
    """The file where `run_call` leaves the pickled result of the call in file `call`."""
    return f"{call}.result-{generation}-{rank}"
