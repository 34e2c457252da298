"""Change the deciders, one place at a time, and see who notices: `python -m tests.mutants`.

A mutant is one function with one change by a named operator. It runs in a process of its own, first
under the simulation, then under the tables of the deciders; who survives both is listed.

    --count 200 --seed 0     which mutants: a sample of all there are
    --schedules 30           simulated jobs for each
    --only round.py:holds_up one function

What cannot be noticed is left out, with a reason: see `EQUIVALENT` and `LEFT_OUT`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.util
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

PACKAGE = "torchelastic."


class Group(NamedTuple):
    """Modules whose mutants the same tests look for."""

    #: Names below `torchelastic`; `x.*`: all modules of a package.
    modules: tuple[str, ...]
    #: The table tests.
    tables: tuple[str, ...]
    #: The store of the simulated jobs; empty: they are not simulated.
    simulation: Literal["embedded", "etcd", ""] = ""


#: The tables of the control plane.
CONTROL = (
    *(f"tests/unit/rendezvous/test_{name}.py" for name in (
        "decide", "decide_in_process", "forming", "quorum", "majority", "suspects", "leader",
        "membership", "election", "connectivity", "replicas",
    )),
    "tests/unit/transport/test_ring.py",
    "tests/unit/agent/test_script.py",
    "tests/unit/agent/test_in_process.py",
)  # fmt: skip
GROUPS = (
    # They matter most when nodes do not reach each other.
    Group(
        (
            "rendezvous.choosing",
            "rendezvous.connectivity",
            "rendezvous.suspects",
            "rendezvous.held_out",
            "rendezvous.leader",
            "rendezvous.membership.suspicion",
            "transport.ring",
        ),
        CONTROL,
        "etcd",
    ),
    Group(
        (
            "rendezvous.decide",
            "rendezvous.round_state",
            "rendezvous.forming",
            "rendezvous.majority",
            "rendezvous.embedded.election",
            "agent.lifecycle.*",
        ),
        CONTROL,
        "embedded",
    ),
    Group(
        (
            "snapshot.layout",
            "snapshot.leave",
            "snapshot.pieces",
            "snapshot.search",
            "snapshot.node.memory",
        ),
        ("tests/unit/snapshot",),
    ),
    Group(("events.merge", "events.timeline", "events.analysis.*"), ("tests/unit/events",)),
)
#: Functions that only make words for people: tests look at some of them, the laws at none.
LEFT_OUT = {
    "names_of": "words",
    "_name_of": "words",
    "_names_of_others": "words",
    "time_limit": "words",
    "sentence": "words",
    "waiting_reason": "words",
    "_reason_for": "words",
    "_who_joins": "words",
    "_who_agrees": "words",
    "_start_reason": "words",
    "_missing": "words",
    "_unfit": "words",
    "_missing_for_world": "words",
    "_shortened": "words",
    "span": "words",
    "_first": "a cache",
    "_place": "ranks, which the simulation has no use for; `test_forming` has",
    "from_config": "copies the user's settings",
}
#: (module, function, operator, source line) -> why nobody can notice.
EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    ("rendezvous.round_state", "published", "number", "finished=-1,"): "below 0 is below 0",
    ("rendezvous.forming", "form", "number", "missing_count=0,"): "words",
}
#: Seconds of the processor for one mutant: some never end.
LIMIT = 60
SURVIVED, BY_SIMULATION, BY_TABLES, BY_TIME = 0, 11, 12, 13
HOW = {BY_SIMULATION: "simulation", BY_TABLES: "tables", BY_TIME: "time", SURVIVED: "SURVIVED"}


class Mutant(NamedTuple):
    module: str
    function: str
    operator: str
    #: The place among all nodes of the function.
    index: int
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.operator}: {self.source}"


# --- operators: a changed copy of a node, or None ------------------------------------------------

_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def compare(node: ast.AST) -> ast.AST | None:
    """`<` for `<=`, `==` for `!=`, `in` for `not in`."""
    if not isinstance(node, ast.Compare):
        return None
    node.ops = [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
    return node


def junction(node: ast.AST) -> ast.AST | None:
    """`and` for `or`."""
    if not isinstance(node, ast.BoolOp):
        return None
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def condition(node: ast.AST) -> ast.AST | None:
    """The opposite of a condition."""
    if not isinstance(node, ast.If | ast.IfExp):
        return None
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def number(node: ast.AST) -> ast.AST | None:
    """One more."""
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return None
    node.value += 1
    return node


def truth(node: ast.AST) -> ast.AST | None:
    """True for False."""
    if not isinstance(node, ast.Constant) or type(node.value) is not bool:
        return None
    node.value = not node.value
    return node


def field(node: ast.AST) -> ast.AST | None:
    """A field that is not changed."""
    if not isinstance(node, ast.Call) or len(node.keywords) < 1:
        return None
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in ("replace", "_report") or node.keywords[-1].arg is None:
        return None
    kept = [key for key in node.keywords if key.arg not in ("reason", "cause", "consequences")]
    if not kept:
        return None
    node.keywords = [key for key in node.keywords if key is not kept[0]]
    return node


def commands(node: ast.AST) -> ast.AST | None:
    """Nothing where something was to be done."""
    if not isinstance(node, ast.List) or not node.elts or not isinstance(node.ctx, ast.Load):
        return None
    node.elts = []
    return node


def sign(node: ast.AST) -> ast.AST | None:
    """`-` for `+`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
        return None
    node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
    return node


OPERATORS: tuple[Callable[[Any], ast.AST | None], ...] = (
    compare,
    junction,
    condition,
    number,
    truth,
    field,
    commands,
    sign,
)


# --- finding and making them ---------------------------------------------------------------------


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{prefix}{node.name}.")
        elif isinstance(node, Function):
            yield f"{prefix}{node.name}", node


def places_in(function: Function) -> list[ast.AST]:
    """The nodes that may be changed: no annotations, no asserts, no words."""
    found: list[ast.AST] = []

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.Assert | ast.JoinedStr):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        found.append(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    look(child)

    for statement in function.body:
        look(statement)
    return found


def source_of(module: str) -> tuple[str, ast.Module]:
    spec = importlib.util.find_spec(PACKAGE + module)
    assert spec is not None, f"{module} is in GROUPS, and not in the package"
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    return text, ast.parse(text)


def modules() -> dict[str, Group]:
    """All modules, and the tests that look for their mutants."""
    return {module: group for group in GROUPS for name in group.modules for module in _named(name)}


def _named(name: str) -> list[str]:
    package, every, _ = name.partition(".*")
    if not every:
        return [name]
    spec = importlib.util.find_spec(PACKAGE + package)
    assert spec is not None
    assert spec.origin is not None
    return [f"{package}.{path.stem}" for path in sorted(Path(spec.origin).parent.glob("[!_]*.py"))]


def all_mutants() -> Iterator[Mutant]:
    for module in modules():
        text, tree = source_of(module)
        lines = text.splitlines()
        for name, function in functions_of(tree):
            if name.rpartition(".")[2] in LEFT_OUT:
                continue
            for index, node in enumerate(places_in(function)):
                for operator in OPERATORS:
                    if operator(copy.copy(node)) is None:
                        continue
                    line = getattr(node, "lineno", function.lineno)
                    source = lines[line - 1].strip()
                    made = Mutant(module, name, operator.__name__, index, line, source)
                    if (module, name, operator.__name__, source) not in EQUIVALENT:
                        yield made


def apply(mutant: Mutant) -> None:
    """Give the function the changed code: whoever has the function has the mutant."""
    module = importlib.import_module(PACKAGE + mutant.module)
    _, tree = source_of(mutant.module)
    function = dict(functions_of(tree))[mutant.function]
    node = places_in(function)[mutant.index]
    operator = next(one for one in OPERATORS if one.__name__ == mutant.operator)
    assert operator(node) is not None
    ast.fix_missing_locations(tree)
    code = compile(tree, str(module.__file__), "exec", dont_inherit=True)
    target = _function(module, mutant.function)
    target.__code__ = _find(code, mutant.function.rpartition(".")[2], target.__code__)


def _function(module: ModuleType, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    found = getattr(found, "fget", found)
    found = getattr(found, "func", found)  # cached_property
    found = getattr(found, "__func__", found)  # classmethod
    found = getattr(found, "__wrapped__", found)
    assert isinstance(found, FunctionType), name
    return found


def _find(code: CodeType, name: str, like: CodeType) -> CodeType:
    left = [code]
    while left:
        one = left.pop()
        if one.co_name == name and one.co_firstlineno == like.co_firstlineno:
            return one
        left += [const for const in one.co_consts if isinstance(const, CodeType)]
    raise LookupError(name)


# --- running them --------------------------------------------------------------------------------


def tried(mutant: Mutant, schedules: int) -> int:
    """In a process of its own: who notices."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(_noticed(mutant, schedules))
        except BaseException:
            os._exit(BY_SIMULATION)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return BY_TIME
    return os.WEXITSTATUS(status)


def _noticed(mutant: Mutant, schedules: int) -> int:
    import pytest

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    apply(mutant)
    group = modules()[mutant.module]
    if _breaks_a_law(group, range(schedules // 4)):
        return BY_SIMULATION
    if pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *group.tables]):
        return BY_TABLES
    rest = range(schedules // 4, schedules)
    return BY_SIMULATION if _breaks_a_law(group, rest) else SURVIVED


def _breaks_a_law(group: Group, seeds: range) -> bool:
    from tests.simulation.fault_schedule import made_from, peers_from
    from tests.simulation.job_simulation import violations

    try:
        make = peers_from if group.simulation == "etcd" else made_from
        return bool(group.simulation) and any(violations(make(seed)) for seed in seeds)
    except Exception:
        return True  # a decider has raised


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=30)
    parser.add_argument("--only", default="", help="MODULE:FUNCTION, or a part of it")
    options = parser.parse_args(argv)
    every = [one for one in all_mutants() if options.only in f"{one.module}:{one.function}"]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    print(f"{len(chosen)} of {len(every):,} mutants", flush=True)
    results: Counter[int] = Counter()
    survivors = []
    for mutant in chosen:
        result = tried(mutant, options.schedules)
        results[result] += 1
        if result == SURVIVED:
            survivors.append(mutant)
        print(f"{HOW.get(result, result)}: {mutant}", flush=True)
    found = len(chosen) - len(survivors)
    counts = ", ".join(f"{HOW.get(how, how)} {count}" for how, count in results.most_common())
    print(f"{found} of {len(chosen)} found ({100 * found / max(len(chosen), 1):.1f} %): {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
