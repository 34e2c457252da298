"""Nothing that comes over a socket is ever unpickled: whoever unpickles is named here, and why."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_architecture import FILES, PACKAGE, imports_of, name_of, nodes_of, pytestmark

__all__ = ["pytestmark"]  # with the tests that read the same files

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
    "checkpoint/storage/safe_pickle.py": "a checkpoint's metadata: only data classes are looked up",
    "worker/bootstrap.py": "the caller's function, in a private directory of its own launcher",
    "launcher/launch_job.py": "what that function has returned, in the same directory",
    "tensors/small_state.py": "this process's own memory",
    "training/state.py": "a checkpoint that the user's own job wrote (guides/checkpoint.md)",
    "training/torch_state.py": "the same, and only tensors are loaded (weights_only)",
}
#: What brings bytes of others into a module.
SOCKETS = {"socket", "asyncio", "ssl", "http", "urllib", "torch.distributed"}


def only_pickles(path: Path) -> bool:
    """Whether a file uses pickle for writing alone, as `ray/node_actor.py`: the function that it
    writes for its worker came with the arguments of Ray's own actor."""
    used = [
        node.attr
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"
    ]
    return used != [] and set(used) <= {"dump", "dumps"}


def unsafe_uses(path: Path) -> list[str]:
    found = [
        f"line {line}: {name}"
        for line, name in imports_of(path)
        if (name.split(".")[0] in UNSAFE or name.startswith(tuple(UNSAFE)))
        and not (name == "pickle" and only_pickles(path))
    ]
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            wanted = UNSAFE_CALLS.get(node.attr)
            if wanted == "" or (wanted and ast.unparse(node.value) == wanted):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_only_those_named_here_unpickle():
    found = {name_of(path): uses for path in FILES if (uses := unsafe_uses(path))}
    assert {name: uses for name, uses in found.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) == set(found), "some do not any more: take them off the list"


def test_none_of_them_reads_a_socket():
    read = [
        f"{name}:{line}: {found}"
        for name in ALLOWED
        for line, found in imports_of(PACKAGE / name)
        if found.startswith(tuple(SOCKETS))
    ]
    assert read == []
