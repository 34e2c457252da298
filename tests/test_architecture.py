"""The shape of the package, read from its source: who may import whom, and how big things get."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tests import retired_words
from torchelastic import errors
from torchelastic.compat.old_names import PATHS
from torchelastic.rendezvous.world import World

pytestmark = pytest.mark.xdist_group("architecture")  # every file is read once

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "torchelastic"
EVERY = sorted(PACKAGE.rglob("*.py"))
#: Import paths of earlier releases: they only re-export, and the rules below are not for them.
SHIMS = {
    path
    for name in PATHS.split()
    for stem in [PACKAGE.joinpath(*name.split("."))]
    for path in (stem.with_suffix(".py"), stem / "__init__.py")
    if path in EVERY
}
FILES = [path for path in EVERY if path not in SHIMS]
#: Packages with names of earlier releases in them, which are loaded when first used.
LAZY = {PACKAGE / "rendezvous" / "__init__.py", PACKAGE / "distributed" / "__init__.py"}

# Top to bottom. A module may import from its own layer and those below.
LAYERS = (
    ("chaos", "cli", "distributed", "__main__"),
    ("compat", "hosts", "integrations", "ray", "torchx", "doctor", "dashboard"),
    ("launcher",),
    ("training",),
    ("agent",),
    ("snapshot",),
    ("worker", "timer", "metrics", "checkpoint", "data"),
    ("cluster", "rendezvous", "tensors"),
    ("transport",),
    ("events", "worker_counters"),
    (
        "backoff",
        "best_effort",
        "clock",
        "config",
        "env",
        "errors",
        "faults",
        "records",
        "side_tasks",
        "system",
        "torch_backends",
        "torch_private",
        "torch_versions",
    ),
)
DEPTH = {part: depth for depth, parts in enumerate(LAYERS) for part in parts}

# Decisions: handed the time and the facts, they touch nothing, nor does what they import.
PURE = {
    f"{where}{name}.py"
    for where, names in {
        "": "records torch_versions",
        "agent/lifecycle/": "in_process last_copy machine node_state script",
        "agent/output/": "terminal_text",
        "agent/telemetry/": "clock_offset",
        "chaos/": "laws",
        "checkpoint/": "fence interval marker",
        "cluster/": (
            "detect indexed_job kubeflow platform runai skypilot slurm torchx_replica volcano"
        ),
        "cluster/kubernetes/": "job_summary",
        "cluster/operator/": "elastic_job leader_lease reconcile worker_pods",
        "cluster/submit/": "job_kinds kubernetes_manifests runai_command slurm_script",
        "compat/torchrun/": "launcher_node_state",
        "dashboard/": "access",
        "data/": "shares verdict",
        "doctor/": "finding",
        "events/": "merge record timeline words",
        "events/analysis/": (
            "bad_steps goodput hangs ranks recoveries series stragglers trace_export view"
        ),
        "metrics/": "job_metrics",
        "ray/": "placement_plan",
        "rendezvous/": (
            "decide forming held_out job_settings majority restart_policy root_cause round_state "
            "suspects"
        ),
        "rendezvous/embedded/": "table",
        "rendezvous/etcd/": "etcd_messages",
        "tensors/": "shard_layout",
        "training/": "gate inbox",
        "transport/": "auth codec http",
        "worker/": "orders",
    }.items()
    for name in names.split()
}
IMPURE = {"torch", "time", "socket", "subprocess", "threading", "asyncio", "os"}

#: Loaded when first used, and programs that the doctor starts.
WITH_TORCH = {
    "compat/collectives.py",
    "doctor/gpu_program.py",
    "doctor/torch_probe.py",
}

#: The only file that touches private names of torch.
PRIVATE = "torch_private.py"
#: Names of the standard library that look private.
OF_PYTHON = {
    "_exit",
    "_fields",
    "_getframe",
    "_inheriting",
    "_make",
    "_register_atexit",
    "_replace",
}

#: Public names of users' APIs that several classes have: `Keep` for each framework.
SHARED_API = {"Keep"}
#: Class names in these files belong to a format, or to another release's API.
NAMED_BY_FORMAT = ("compat/", "events/api.py", "events/types.py", "worker/orders.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    """The package or module directly under `torchelastic` that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All that other modules, the environment and sizes can be found in, without what only type
    checkers read."""
    found, left = [], [ast.parse(path.read_text(), str(path))]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        found.append(node)
        left.extend(ast.iter_child_nodes(node))
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in found if isinstance(node, kinds)]


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and full name of everything a file imports, inside functions too."""
    found = []
    for node in nodes_of(path):
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


@cache
def reached_from(path: Path) -> frozenset[Path]:
    """A file and all files of the package that importing it imports."""
    found, left = {path}, [path]
    while left:
        names = [name for _, name in imports_of(left.pop()) if name.startswith("torchelastic.")]
        new = {file for name in names if (file := file_of(name)) is not None} - found
        found |= new
        left += new
    return frozenset(found)


def file_of(name: str) -> Path | None:
    """The file of a module, or of the module that has this name in it."""
    for dotted in (name, name.rpartition(".")[0]):
        place = PACKAGE.parent.joinpath(*dotted.split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path in FILES:
                return path
    return None


def test_nothing_imports_from_a_layer_above():
    layered = [path for path in FILES if part_of(path) != "__init__" and path not in LAZY]
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


def test_packages_import_each_other_in_one_direction():
    uses: dict[str, set[str]] = {}
    for path in set(FILES) - LAZY - {PACKAGE / "__init__.py"}:
        names = {name.split(".")[1] for _, name in imports_of(path) if "torchelastic." in name}
        uses.setdefault(part_of(path), set()).update(names - {part_of(path)})
    while free := [part for part, others in uses.items() if not others & set(uses)]:
        for part in free:
            del uses[part]
    assert uses == {}, "among these is a cycle"


def test_paths_of_earlier_releases_only_re_export():
    assert len(SHIMS) == len(PATHS.split()), "a path in compat/old_names.py has no file"
    for path in SHIMS:
        kinds = {type(node) for node in ast.parse(path.read_text()).body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, name_of(path)
        assert len(path.read_text().splitlines()) <= 10, name_of(path)


def test_every_package_says_where_it_runs_and_what_for():
    places = (
        "Agent process",
        "Agent and zygote",
        "Any process",
        "Command line",
        "Dashboard process",
        "Launching process",
        "Tests",
        "torchrun's process",
        "Worker process",
    )
    silent = [
        name_of(path)
        for path in EVERY
        if path.name == "__init__.py"
        and path.parent != PACKAGE
        and "startup" not in path.parts
        and not (ast.get_docstring(ast.parse(path.read_text())) or "").startswith(
            tuple(f"{place}: " for place in places)
        )
    ]
    assert silent == []


def test_no_two_files_have_one_name():
    own = [path for path in FILES if part_of(path) != "distributed"]  # names of users' commands
    stems = Counter(path.stem for path in own if not path.stem.startswith("__"))
    assert [stem for stem, count in stems.items() if count > 1] == []


def test_names_are_words_of_the_field():
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]
        for name in [path.stem, *names_in(path)]
        for _ in retired_words.in_name(name)
    }
    assert sorted(found) == []


def names_in(path: Path) -> set[str]:
    """Names of variables, attributes, parameters, functions and classes."""
    nodes = ast.walk(ast.parse(path.read_text()))
    keys = ("id", "attr", "arg", "name")
    return {
        name for node in nodes for key in keys if isinstance(name := getattr(node, key, 0), str)
    }


def test_no_two_classes_have_one_name():
    public: dict[str, list[str]] = {}
    for path in FILES:
        if not name_of(path).startswith(NAMED_BY_FORMAT):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    public.setdefault(node.name, []).append(name_of(path))
    assert {k: v for k, v in public.items() if len(v) > 1 and k not in SHARED_API} == {}


def test_the_documentation_has_no_retired_word():
    pages = (ROOT / "docs").rglob("*.md")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for match in retired_words.IN_PROSE.finditer(prose_of(path))
    ]
    assert found == []


def prose_of(path: Path) -> str:
    """A page without its code, which may have names from messages and files."""
    return re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)


def test_the_map_in_the_package_names_every_part_in_its_layer():
    text = (ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text())) or "").partition(
        "Layout"
    )[2]
    layers = [
        set(re.findall(r"\w+", " ".join(line[:25] if "  " in line[4:] else line for line in part)))
        for block in text.split("\n\n")
        if (part := [line for line in block.splitlines() if line.startswith("    ")])
    ]
    assert layers == [set(layer) - {"__main__"} for layer in LAYERS]


def test_the_errors_are_drawn_where_they_are():
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"([│ ]*)[├└]── (\w+(?:, \w+)*)", line)
        if found:
            drawn += [(len(found[1]) // 4, name) for name in found[2].split(", ")]
    above = {-1: errors.TorchElasticError}
    for depth, name in drawn:
        above[depth] = getattr(errors, name)
        assert above[depth - 1] in above[depth].__bases__, name
    known = {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type)}
    assert {name for _, name in drawn} == known - {"TorchElasticError"}


def test_the_page_of_states_has_every_phase_of_a_world():
    page = (ROOT / "docs/concepts/states.md").read_text()
    phases = get_args(get_type_hints(World)["phase"])
    assert [phase for phase in phases if f"| {phase} |" not in page] == []


def test_the_package_itself_imports_nothing_of_its_own():
    assert imported_from(PACKAGE / "__init__.py", {"torchelastic"}) == []


def test_decisions_touch_nothing():
    assert sorted(PURE - set(map(name_of, FILES))) == [], "there are no such files"
    touched = {
        f"{name} by {use}"
        for name in PURE
        for path in reached_from(PACKAGE / name)
        for use in imported_from(path, IMPURE)
    }
    assert sorted(touched) == []


def test_agent_and_command_line_do_not_import_torch():
    lean = ("agent", "cli", "dashboard", "distributed", "doctor")
    files = [path for path in FILES if part_of(path) in lean and name_of(path) not in WITH_TORCH]
    assert [use for path in files for use in imported_from(path, {"torch"})] == []


def test_one_package_imports_the_client_of_kubernetes():
    """Agents and workers never do: training does not depend on the API server."""
    files = [path for path in FILES if not name_of(path).startswith("cluster/kubernetes/")]
    assert [use for path in files for use in imported_from(path, {"kubernetes"})] == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_used(path: Path) -> list[tuple[int, str]]:
    """Attributes of others than `self`, by their line."""
    return [
        (node.lineno, node.attr)
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and getattr(node.value, "id", "") not in ("self", "cls")
    ]


@cache
def own_private_names() -> set[str]:
    """The package's own private names: functions, attributes, fields."""
    names = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    names.add(name)
    return names


def test_one_file_touches_private_names_of_torch():
    of_torch = {name for _, name in private_names_used(PACKAGE / PRIVATE)}
    by_text = {"_version", "_buffers", "_local_tensor", "_spec"}  # `attrgetter`
    of_torch |= by_text
    own = own_private_names()
    allowed = (own | OF_PYTHON) - of_torch
    touched = []
    for path in FILES:
        if name_of(path) == PRIVATE or part_of(path) == "integrations":  # of other frameworks
            continue
        found = [(line, name) for line, name in private_names_used(path) if name not in allowed]
        found += [
            (line, name)
            for line, name in imports_of(path)
            if name.split(".")[0] == "torch"
            and ("distributed_c10d" in name or any(map(is_private, name.split("."))))
        ]
        text = path.read_text()
        found += [(0, name) for name in sorted(by_text - own) if f'"{name}"' in text]
        touched += [f"{name_of(path)}:{line}: {name}" for line, name in found]
    assert touched == []


def test_only_env_reads_the_environment():
    names = {"os.environ", "os.getenv", "os.putenv"}
    reads = []
    for path in set(FILES) - {PACKAGE / "env.py"}:
        lines = [line for line, name in imports_of(path) if name in names]
        lines += [
            node.lineno
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and f"{node.value.id}.{node.attr}" in names
        ]
        reads += [f"{name_of(path)}:{line}" for line in lines]
    assert sorted(reads) == []
