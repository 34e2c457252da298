"""The command lines for Run:ai, by table."""

import shlex

import pytest

from torchelastic.cluster.submit.runai_command import RunaiJob, words
from torchelastic.errors import ConfigError


def rendered(**changes):
    job = {"name": "lm", "image": "img:1", "min_nodes": 2, "max_nodes": 4}
    made = words(RunaiJob(**{**job, "command": ["torchelastic", "run", "t.py"], **changes}))
    head, _, command = shlex.join(made).partition(" --command -- ")
    assert command == "torchelastic run t.py"
    return head


TODAY = "runai training pytorch submit lm --image img:1 --no-master --workers 4"
BEFORE = "runai submit-dist pytorch --name lm --image img:1 --workers"
ELASTIC = "--min-replicas 2 --max-replicas 4"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, f"{TODAY} {ELASTIC}"),
        # Also of a fixed size: only pods of an elastic job without a master are told where to meet.
        ({"min_nodes": 4}, f"{TODAY} --min-replicas 4 --max-replicas 4"),
        ({"project": "team", "gpus": "8"}, f"{TODAY} {ELASTIC} --project team -g 8"),
        ({"environment": ["A=1", "B=x y"]}, f"{TODAY} {ELASTIC} -e A=1 -e 'B=x y'"),
        ({"job_dir": "/shared/"}, f"{TODAY} {ELASTIC} -e TORCHELASTIC_JOB_DIR=/shared/lm"),
        (
            {"ports": ["service-type=NodePort,container=8080"], "run_as_user": True},
            f"{TODAY} {ELASTIC} --port service-type=NodePort,container=8080 --run-as-user",
        ),
        ({"options": ["--large-shm"]}, f"{TODAY} {ELASTIC} --large-shm"),
        # The older CLI adds a master, which is a node, too.
        ({"legacy": True}, f"{BEFORE} 3 --min-replicas 1 --max-replicas 3"),
        ({"legacy": True, "min_nodes": 4}, f"{BEFORE} 3 --min-replicas 3 --max-replicas 3"),
        ({"legacy": True, "min_nodes": 1, "max_nodes": 1}, f"{BEFORE} 0"),
        (
            {"legacy": True, "ports": ["service-type=NodePort,container=8080"]},
            f"{BEFORE} 3 --min-replicas 1 --max-replicas 3 --service-type nodeport --port 8080",
        ),
        (
            {"legacy": True, "ports": ["container=8080,external=30080"]},
            f"{BEFORE} 3 --min-replicas 1 --max-replicas 3 "
            "--service-type nodeport --port 30080:8080",
        ),
    ],
)
def test_the_command_line(changes, expected):
    assert rendered(**changes) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": ["A"]}, "--environment 'A' is not a variable"),
        ({"environment": ["=1"]}, "--environment '=1' is not a variable"),
        ({"environment": ["TORCHELASTIC_SECRET=x"]}, "would show TORCHELASTIC_SECRET to everyone"),
        ({"options": ["large-shm"]}, "--runai-option 'large-shm' is not an option"),
        ({"legacy": True, "ports": ["8080"]}, "--port '8080' names no port of the container"),
    ],
)
def test_what_is_wrong_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        rendered(**changes)
