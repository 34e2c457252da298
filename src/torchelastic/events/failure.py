"""A failure as a recorded fact: it crosses processes and machines as JSON."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: What of a worker's last lines travels with its failure, which every node is told of.
MOST_LINES, MOST_LOG, MOST_LINE = 20, 4000, 500
#: Characters of a hint, and of the words for a collective.
MOST_HINT = 500
#: Exceptions of a program that cannot run, or asks for what we do not support, wherever it starts.
INCURABLE = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"}
    | {"ConfigError", "ProcessesError", "ProgramMissing"}
)
#: What colours text, and moves the cursor of a terminal.
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")
_EXCEPTION = re.compile(r"([\w.]+)(?::|$)")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 77` where the platform has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker that ended otherwise than by success; or, without a rank, a node that is gone."""

    generation: int
    node: str
    #: -1: of a node, or of a worker that has no rank yet.
    rank: int
    local_rank: int
    pid: int
    #: As `subprocess` has it: the exit code, or minus the signal's number.
    exitcode: int
    #: `RuntimeError: boom` when the worker told; otherwise what its exit says.
    message: str
    traceback: str = ""
    #: `train.py:37 in step`: the innermost frame of the user's code in that traceback.
    place: str = ""
    role: str = "default"
    step: int | None = None
    #: It ended after its agent had begun to stop it: whatever it says, it is not the cause.
    stopped: bool = False
    #: The worker lives on: it has rolled back and waits for the next world.
    alive: bool = False
    #: Trying again cannot help: the job ends.
    fatal: bool = False
    error_file: str = ""
    #: Wall clock of the failing node, for people and for `error.json`; never compared.
    wall_time: float = 0.0
    #: What the agent has found out beyond what the worker said: `out of memory: …`.
    hint: str = ""
    #: The last lines it wrote, where they went through the agent's hands or to its files.
    log_lines: tuple[str, ...] = ()
    #: The last collective it entered, in words; empty where that is not known.
    collective: str = ""
    #: How many collectives it had entered in its generation; -1: not known.
    entered: int = -1
    #: It was waiting for others in a collective when it failed.
    waited: bool = False
    #: Not the first failure, but no consequence of it either: `root_cause.pick` says so.
    by_itself: bool = False

    @property
    def told(self) -> bool:
        """Whether the worker itself said what went wrong."""
        return bool(self.traceback)

    @property
    def out_of_memory(self) -> bool:
        """Whether that is what the agent has found."""
        return self.hint.startswith("out of memory")

    @property
    def is_node(self) -> bool:
        """Whether it is a whole node that failed."""
        return self.rank < 0 and self.local_rank < 0

    def exit_words(self) -> str:
        """`exit code 3` or `SIGKILL`."""
        if self.exitcode < 0:
            return signal_name(-self.exitcode)
        return f"exit code {self.exitcode}"

    def sentence(self) -> str:
        """`rank 3 on node-b (local rank 1, pid 42) at step 17: RuntimeError: boom`, in one line."""
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
        """The type of the exception; of a failure without one, its message without the numbers,
        which differ from one time to the next."""
        named = _EXCEPTION.match(self.message) if self.told else None
        return named[1] if named else _NUMBER.sub("#", self.message)

    @property
    def incurable(self) -> bool:
        """Whether a restart of the same program would end in the same way."""
        return self.told and self.kind in INCURABLE

    def signature(self) -> tuple[int, str, str]:
        """Equal for two failures of the same kind at the same place, whoever the worker was."""
        return (self.exitcode, self.kind, self.place)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"log_lines": list(self.log_lines)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Failure:
        """As `to_json` made it, here or in another version. What makes no sense is left out: no
        leader shall fall over a failure. What is too long is cut: it is sent on to every node.
        """
        sensible = {
            key: value for key, value in data.items() if key in _CHECKS and _CHECKS[key](value)
        }
        return cls(**_NOT_TOLD | sensible | _cut(sensible))


def node_failure(node: str, generation: int, message: str) -> Failure:
    """A node is gone without a word, its agent and all its workers with it."""
    return Failure(
        generation=generation,
        node=node,
        rank=-1,
        local_rank=-1,
        pid=0,
        exitcode=1,
        message=message,
    )


#: How one line begins, in brackets, that stands for a traceback which was printed before.
SAME = "the same traceback as in generation"


def last_lines(text: str, besides: str = "") -> tuple[str, ...]:
    """The last lines of a text, as many as may travel with a failure, without those of a traceback
    that is told besides: Python writes that as well, and torch with the rank before each line.

    >>> last_lines("one\\ntwo\\n[rank1]:   boom", "  boom")
    ('one', 'two')
    >>> last_lines("one\\nKeyError: 1 (the same traceback as in generation 3, 2 times now)")
    ('one',)
    """
    told = tuple({line.rstrip() for line in besides.splitlines() if line.strip()})
    lines = [_shown(line) for line in text.splitlines() if f" ({SAME} " not in line]
    return _bounded([line for line in lines if line and not line.endswith(told)])


def _shown(line: str) -> str:
    """Without colours and what else a terminal would act upon."""
    bare = _ESCAPES.sub("", line.expandtabs()).rstrip()[:MOST_LINE]
    return "".join(one if one.isprintable() else "�" for one in bare)


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    """The last ones that are not too many, nor too long together."""
    kept: list[str] = []
    room = MOST_LOG
    for line in reversed(lines[-MOST_LINES:]):
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return tuple(reversed(kept))


def _cut(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of the texts that have a bound, within it."""
    made: dict[str, Any] = {
        name: data[name][:MOST_HINT] for name in ("hint", "collective", "place") if name in data
    }
    if "log_lines" in data:
        made["log_lines"] = _bounded([line[:MOST_LINE] for line in data["log_lines"]])
    return made


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    """One that a calendar has: neither infinite nor of the year 10,000."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < 2.5e11


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_lines(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(line, str) for line in value)


#: What a value read from JSON must be, by the type its field is declared to have.
_BY_TYPE: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": _is_time,
    "str": _is_text,
    "bool": lambda value: isinstance(value, bool),
    "tuple[str, ...]": _is_lines,
}
_CHECKS = {field.name: _BY_TYPE[str(field.type)] for field in dataclasses.fields(Failure)}
#: What is shown where nothing was told.
_NOT_TOLD: dict[str, Any] = {
    "generation": -1,
    "node": "?",
    "rank": -1,
    "local_rank": -1,
    "pid": 0,
    "exitcode": 1,
    "message": "not told",
}
