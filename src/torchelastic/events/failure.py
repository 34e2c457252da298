"""A failure as a recorded fact: it crosses processes and machines as JSON."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchelastic.errors import OtherBitsError

#: Bounds of the last log lines in a failure, which is sent to every node.
LOG_LINES_LIMIT, LOG_LENGTH_LIMIT, LINE_LENGTH_LIMIT = 20, 4000, 500
#: Characters of a hint, and of a collective's description.
HINT_LENGTH_LIMIT = 500
#: Exceptions of a program that cannot run anywhere, or that asks for something unsupported.
INCURABLE = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"}
    | {"ConfigError", "ProgramMissing"}
)
#: How the message of an `OtherBitsError` begins.
OTHER_BITS = f"{OtherBitsError.__name__}: "
#: Exceptions that may be over after some time: those of the operating system, such as a file
#: system or a network that is not there yet, and timeouts. Also as the cause of another exception.
_PASSING = re.compile(
    r"^(?:[\w.]+\.)?(?:\w*(?:OSError|IOError|Connection|Network|HTTP|Unavailable|Time(?:d)?_?[oO]ut)\w*"
    r"|(?:File|URL|SSL|BrokenPipe|Permission|Interrupted|ChildProcess|ProcessLookup|NotADirectory"
    r"|IsADirectory)\w*Error|gaierror|herror|timeout)(?::|$)",
    re.MULTILINE,
)
#: Terminal escape sequences.
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")
_EXCEPTION = re.compile(r"([\w.]+)(?::|$)")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; `signal 77` if the platform has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a worker or, without a rank, of a node."""

    generation: int
    node: str
    #: -1: a node, or a worker that has no rank yet.
    rank: int
    local_rank: int
    pid: int
    #: As `subprocess` has it: the exit code, or minus the signal's number.
    exitcode: int
    #: `RuntimeError: boom` if the worker reported it; otherwise how it exited.
    message: str
    traceback: str = ""
    #: `train.py:37 in step`: the innermost frame of the user's code in that traceback.
    place: str = ""
    role: str = "default"
    step: int | None = None
    #: It ended after its agent began to stop it, so it is not the cause.
    stopped: bool = False
    #: The process is still running: it rolled back and waits for the next world.
    alive: bool = False
    #: A restart cannot help: the job ends.
    fatal: bool = False
    error_file: str = ""
    #: Wall clock of the failing node, for people and for `error.json`; never compared.
    wall_time: float = 0.0
    #: What the agent found out in addition: `out of memory: …`.
    hint: str = ""
    #: The last lines it wrote, if its output went through the agent or to its files.
    log_lines: tuple[str, ...] = ()
    #: The last collective it entered, as text; empty: unknown.
    collective: str = ""
    #: How many collectives it had entered in its generation; -1: unknown.
    entered: int = -1
    #: It was waiting for others in a collective when it failed.
    waited: bool = False
    #: Neither the first failure nor a consequence of it, according to `root_cause.pick`.
    by_itself: bool = False
    #: It happened in the last step of the generation before: the worker had not entered this one.
    before: bool = False

    @property
    def told(self) -> bool:
        """True if the worker itself reported its error."""
        return bool(self.traceback)

    @property
    def out_of_memory(self) -> bool:
        """True if the agent found an out-of-memory kill."""
        return self.hint.startswith("out of memory")

    @property
    def is_node(self) -> bool:
        """True if a whole node failed."""
        return self.rank < 0 and self.local_rank < 0

    def exit_words(self) -> str:
        """`exit code 3` or `SIGKILL`."""
        if self.exitcode < 0:
            return signal_name(-self.exitcode)
        return f"exit code {self.exitcode}"

    def sentence(self) -> str:
        """Return `rank 3 on node-b (local rank 1, pid 42) at step 17: RuntimeError: boom`."""
        step = f" at step {self.step}" if self.step is not None else ""
        first_line = self.message.strip().partition("\n")[0]
        if self.is_node:
            return f"{self.node} failed: {first_line}"
        return (
            f"rank {self.rank} on {self.node} (local rank {self.local_rank}, pid {self.pid})"
            f"{step}: {first_line}"
        )

    @property
    def kind(self) -> str:
        """The exception type, or else the message without its numbers, which vary."""
        named = _EXCEPTION.match(self.message) if self.told else None
        return named[1] if named else _NUMBER.sub("#", self.message)

    @property
    def incurable(self) -> bool:
        """True if a restart of the same program would fail in the same way."""
        return self.told and self.kind in INCURABLE

    @property
    def other_bits(self) -> bool:
        """True if the worker was found to compute other bits than the others."""
        return self.message.startswith(OTHER_BITS)

    @property
    def passing(self) -> bool:
        """True if time may cure the error that the worker reported."""
        return self.told and bool(_PASSING.search(f"{self.message}\n{self.traceback}"))

    def signature(self) -> tuple[int, str, str]:
        """Return a key that is equal for failures of the same kind in the same line of code."""
        return (self.exitcode, self.kind, self.place)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"log_lines": list(self.log_lines)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Failure:
        """Parse the output of `to_json`, of this or another version.

        Invalid values are dropped, so that they cannot crash the leader. Long values are cut: a
        failure is sent to every node.
        """
        sensible = {
            key: value for key, value in data.items() if key in _CHECKS and _CHECKS[key](value)
        }
        return cls(**_UNKNOWN | sensible | _cut(sensible))


def node_failure(node: str, generation: int, message: str) -> Failure:
    """Return the failure of a node that is gone with its agent and all its workers."""
    return Failure(
        generation=generation,
        node=node,
        rank=-1,
        local_rank=-1,
        pid=0,
        exitcode=1,
        message=message,
    )


#: The notes in parentheses that replace a traceback begin like this: it was printed before, or
#: the worker only lost a peer.
SAME = "the same traceback as in generation"
CONSEQUENCE = "another rank is gone; the traceback is in"
#: Messages of gloo, NCCL and torch's stores when the process at the other end is gone.
_PEER_GONE = re.compile(
    r"gloo/transport/.*(connection closed by peer|connection reset|broken pipe)"
    r"|failed to recv, got 0 bytes"
    r"|nccl communicator was aborted"
    r"|ncclremoteerror",
    re.IGNORECASE,
)


def says_peer_gone(message: str) -> bool:
    """Return whether this message of a collective or a store only says that a peer is gone.

    >>> says_peer_gone("[gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:7")
    True
    """
    return _PEER_GONE.search(message) is not None


def last_lines(text: str, besides: str = "") -> tuple[str, ...]:
    """Return the last lines of a text, bounded, without those of the traceback `besides`.

    Python prints that traceback as well, and torch with the rank before each line.

    >>> last_lines("one\\ntwo\\n[rank1]:   boom", "  boom")
    ('one', 'two')
    >>> last_lines("one\\nKeyError: 1 (the same traceback as in generation 3, 2 times now)")
    ('one',)
    """
    known = tuple({line.rstrip() for line in besides.splitlines() if line.strip()})
    notes = (f" ({SAME} ", f" ({CONSEQUENCE} ")
    lines = [_shown(line) for line in text.splitlines() if not any(note in line for note in notes)]
    return _bounded([line for line in lines if line and not line.endswith(known)])


def _shown(line: str) -> str:
    """Remove escape sequences and other unprintable characters."""
    bare = _ESCAPES.sub("", line.expandtabs()).rstrip()[:LINE_LENGTH_LIMIT]
    return "".join(one if one.isprintable() else "�" for one in bare)


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last lines within the bounds on number and total length."""
    kept: list[str] = []
    room = LOG_LENGTH_LIMIT
    for line in reversed(lines[-LOG_LINES_LIMIT:]):
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return tuple(reversed(kept))


def _cut(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounded texts of a failure, cut."""
    made: dict[str, Any] = {
        name: data[name][:HINT_LENGTH_LIMIT]
        for name in ("hint", "collective", "place")
        if name in data
    }
    if "log_lines" in data:
        made["log_lines"] = _bounded([line[:LINE_LENGTH_LIMIT] for line in data["log_lines"]])
    return made


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    """Accept only times that a calendar can show: finite and before the year 10,000."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < 2.5e11


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_lines(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(line, str) for line in value)


#: Checks of values read from JSON, by the declared type of the field.
_BY_TYPE: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": _is_time,
    "str": _is_text,
    "bool": lambda value: isinstance(value, bool),
    "tuple[str, ...]": _is_lines,
}
_CHECKS = {field.name: _BY_TYPE[str(field.type)] for field in dataclasses.fields(Failure)}
#: Values of fields that are missing.
_UNKNOWN: dict[str, Any] = {
    "generation": -1,
    "node": "?",
    "rank": -1,
    "local_rank": -1,
    "pid": 0,
    "exitcode": 1,
    "message": "unknown error",
}
