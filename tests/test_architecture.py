"""The shape of the package, read from its source: who may import whom, and how big things get."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "torchelastic"
FILES = sorted(PACKAGE.rglob("*.py"))

# Top to bottom. A module may import from its own layer and those below.
LAYERS = (
    ("cli", "dashboard", "distributed", "__main__"),
    ("integrations", "doctor"),
    ("p2p", "coordinator", "state", "train_loop", "worker_stats", "fault_injection"),
    ("agent", "training", "multiprocessing", "launcher", "torchrun"),
    ("worker", "timer", "metrics"),
    ("rendezvous", "snapshot", "checkpoint", "data", "utils"),
    ("events", "jobs", "event_logger"),
    (
        "config",
        "env",
        "errors",
        "clock",
        "codec",
        "failure",
        "faults",
        "milestones",
        "http1",
        "http1_socket",
        "stalls",
        "tensor_bytes",
        "terminal_text",
    ),
)
DEPTH = {part: depth for depth, parts in enumerate(LAYERS) for part in parts}

# Decisions: handed the time and the facts, they touch nothing.
PURE = {
    f"{where}{name}.py"
    for where, names in {
        "": "codec http1 terminal_text",
        "agent/": "crew group_state heard scraping",
        "checkpoint/": "fence grace interval marker retention",
        "cli/": "rendezvous_rules",
        "dashboard/": "answers door",
        "data/": "batch_policy progress shares verdict",
        "doctor/": "environment finding machine network times",
        "events/": (
            "goodput hangs merge node_time ranks record recoveries series step_time "
            "stragglers trace view words"
        ),
        "metrics/": "job_metrics",
        "rendezvous/": (
            "forming replacing resident restart_policy root_cause round round_state secret "
            "succession url"
        ),
        "rendezvous/embedded/": "journal lobby table",
        "rendezvous/etcd/": "feed messages",
        "snapshot/": "bandwidth messages placement",
        "torchrun/": "guest_state parameters",
        "training/": "gate inbox keeping_boxes keeping_plan outcome",
        "worker/": "orders",
    }.items()
    for name in names.split()
}
IMPURE = {"torch", "time", "socket", "subprocess", "threading", "asyncio", "os"}

#: Loaded when first used, and programs that the doctor starts.
WITH_TORCH = {
    "distributed/collectives.py",
    "doctor/path_program.py",
    "doctor/torch_probe.py",
}

MOST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 80


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    """The package or module directly under `torchelastic` that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """The tree without what only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from without_type_checking(child)


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and full name of everything a file imports, inside functions too."""
    found = []
    for node in without_type_checking(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def imported_from(path: Path, packages: set[str]) -> list[str]:
    """Where a file imports one of these packages."""
    return [
        f"{name_of(path)}:{line}: {name}"
        for line, name in imports_of(path)
        if name.split(".")[0] in packages
    ]


def test_nothing_imports_from_a_layer_above():
    layered = [path for path in FILES if part_of(path) != "__init__"]
    nowhere = {part_of(path) for path in layered} - set(DEPTH)
    assert nowhere == set(), "say in LAYERS where they belong"
    upward = [
        f"{name_of(path)}:{line}: {name}"
        for path in layered
        for line, name in imports_of(path)
        if name.startswith("torchelastic.")
        and DEPTH.get(name.split(".")[1], len(LAYERS)) < DEPTH[part_of(path)]
    ]
    assert upward == []


def test_the_package_itself_imports_nothing_of_its_own():
    assert imported_from(PACKAGE / "__init__.py", {"torchelastic"}) == []


def test_decisions_touch_nothing():
    assert sorted(PURE - set(map(name_of, FILES))) == [], "there are no such files"
    touched = [use for name in sorted(PURE) for use in imported_from(PACKAGE / name, IMPURE)]
    assert touched == []


def test_agent_and_command_line_do_not_import_torch():
    lean = ("agent", "cli", "dashboard", "distributed", "doctor")
    files = [path for path in FILES if part_of(path) in lean and name_of(path) not in WITH_TORCH]
    assert [use for path in files for use in imported_from(path, {"torch"})] == []


def test_only_env_reads_the_environment():
    names = {"os.environ", "os.getenv", "os.putenv"}
    reads = []
    for path in set(FILES) - {PACKAGE / "env.py"}:
        lines = [line for line, name in imports_of(path) if name in names]
        lines += [
            node.lineno
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and f"{node.value.id}.{node.attr}" in names
        ]
        reads += [f"{name_of(path)}:{line}" for line in lines]
    assert sorted(reads) == []


def test_files_and_functions_stay_small():
    big = []
    for path in FILES:
        lines = len(path.read_text().splitlines())
        if lines > MOST_LINES:
            big.append(f"{name_of(path)}: {lines} lines")
        big += [
            f"{name_of(path)}: {node.name}: {node.end_lineno - node.lineno + 1} lines"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
        ]
    assert big == []
