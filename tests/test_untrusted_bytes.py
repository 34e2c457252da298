"""Nothing that comes over a socket is ever unpickled: whoever unpickles is named here, and why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_architecture import FILES, imports_of, name_of, tree_of

#: Modules whose loads run what the bytes say, or crash on bytes that were made to.
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing.connection"}
#: torch's ways to the same: from a file, and from the other ranks.
UNSAFE_CALLS = {
    "load": "torch",
    "all_gather_object": "",
    "gather_object": "",
    "broadcast_object_list": "",
    "scatter_object_list": "",
    "recv_object_list": "",
}

#: Each one, and where its bytes come from.
ALLOWED = {
    "checkpoint/restricted.py": "a checkpoint's metadata: only names of data classes are looked up",
    "worker/bootstrap.py": "the caller's function, in a private directory of its own launcher",
    "multiprocessing/calls.py": "what that function has returned, in the same directory",
    "training/small.py": "this process's own memory",
    "training/state.py": "a checkpoint that the user's own job has written (docs/checkpoint.md)",
    "training/torch_state.py": "the same, and only tensors are loaded (weights_only)",
}
#: What brings bytes of others into a module.
SOCKETS = {"socket", "asyncio", "ssl", "http", "urllib", "torch.distributed"}


def unsafe_uses(path: Path) -> list[str]:
    found = [
        f"line {line}: {name}"
        for line, name in imports_of(path)
        if name.split(".")[0] in UNSAFE or name.startswith(tuple(UNSAFE))
    ]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            wanted = UNSAFE_CALLS.get(node.func.attr)
            if wanted == "" or (wanted and ast.unparse(node.func.value) == wanted):
                found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_those_named_here_unpickle(path):
    if name_of(path) in ALLOWED:
        assert unsafe_uses(path), "it does not any more: take it off the list"
    else:
        assert unsafe_uses(path) == []


@pytest.mark.parametrize("name", ALLOWED)
def test_none_of_them_reads_a_socket(name):
    (path,) = [path for path in FILES if name_of(path) == name]
    assert [found for _, found in imports_of(path) if found.startswith(tuple(SOCKETS))] == []
