"""The shape of the package, read from its source: who may import whom, and how big things get."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    "codec.py",
    "http1.py",
    "terminal_text.py",
    "dashboard/answers.py",
    "dashboard/door.py",
    "worker/orders.py",
    "rendezvous/round.py",
    "rendezvous/replacing.py",
    "rendezvous/round_state.py",
    "rendezvous/forming.py",
    "rendezvous/resident.py",
    "rendezvous/restart_policy.py",
    "rendezvous/root_cause.py",
    "rendezvous/succession.py",
    "rendezvous/embedded/table.py",
    "rendezvous/embedded/journal.py",
    "rendezvous/etcd/feed.py",
    "rendezvous/etcd/messages.py",
    "rendezvous/url.py",
    "rendezvous/secret.py",
    "rendezvous/embedded/lobby.py",
    "snapshot/placement.py",
    "snapshot/bandwidth.py",
    "snapshot/messages.py",
    "torchrun/guest_state.py",
    "torchrun/parameters.py",
    "agent/group_state.py",
    "agent/crew.py",
    "agent/scraping.py",
    "agent/heard.py",
    "checkpoint/interval.py",
    "checkpoint/retention.py",
    "checkpoint/grace.py",
    "checkpoint/fence.py",
    "checkpoint/marker.py",
    "training/gate.py",
    "training/inbox.py",
    "training/keeping_boxes.py",
    "training/keeping_plan.py",
    "training/outcome.py",
    "agent/restart_policy.py",
    "data/batch_policy.py",
    "data/shares.py",
    "data/progress.py",
    "data/verdict.py",
    "events/goodput.py",
    "events/hangs.py",
    "events/merge.py",
    "events/node_time.py",
    "events/ranks.py",
    "events/record.py",
    "events/recoveries.py",
    "events/series.py",
    "events/step_time.py",
    "events/stragglers.py",
    "events/trace.py",
    "events/view.py",
    "metrics/job_metrics.py",
    "events/words.py",
    "cli/rendezvous_rules.py",
    "doctor/finding.py",
    "doctor/machine.py",
    "doctor/network.py",
    "doctor/times.py",
    "doctor/environment.py",
}
IMPURE = {"torch", "time", "socket", "subprocess", "threading", "asyncio", "os"}

#: Programs that the doctor starts.
TORCH_IN_A_PROCESS_OF_ITS_OWN = {"doctor/torch_probe.py", "doctor/path_program.py"}

MOST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 80


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    """The package or module directly under `torchelastic` that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """The tree without what only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from without_type_checking(child)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, inside functions too."""
    for node in without_type_checking(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def layered() -> list[Path]:
    return [path for path in FILES if part_of(path) != "__init__"]


@pytest.mark.parametrize("path", layered(), ids=name_of)
def test_nothing_imports_from_a_layer_above(path):
    assert part_of(path) in DEPTH, "say in LAYERS where it belongs"
    here = DEPTH[part_of(path)]
    upward = [
        f"line {line}: {name}"
        for line, name in imports_of(path)
        if name.startswith("torchelastic.") and DEPTH.get(name.split(".")[1], here) < here
    ]
    assert upward == []


def test_the_package_itself_imports_nothing_of_its_own():
    own = [name for _, name in imports_of(PACKAGE / "__init__.py") if "torchelastic" in name]
    assert own == []


@pytest.mark.parametrize("path", [path for path in FILES if name_of(path) in PURE], ids=name_of)
def test_decisions_touch_nothing(path):
    touched = {name.split(".")[0] for _, name in imports_of(path)} & IMPURE
    assert touched == set()


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in FILES
        if part_of(path) in ("agent", "cli", "dashboard", "distributed", "doctor")
        and name_of(path) != "distributed/collectives.py"  # loaded when first used
        and name_of(path) not in TORCH_IN_A_PROCESS_OF_ITS_OWN
    ],
    ids=name_of,
)
def test_agent_and_command_line_do_not_import_torch(path):
    assert [name for _, name in imports_of(path) if name.split(".")[0] == "torch"] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_env_reads_the_environment(path):
    if name_of(path) == "env.py":
        return
    reads = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    reads += [
        line for line, name in imports_of(path) if name in ("os.environ", "os.getenv", "os.putenv")
    ]
    assert reads == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_stay_small(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES
    big = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    ]
    assert big == []
