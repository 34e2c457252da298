"""`torchelastic submit kubernetes`, `scale` and `delete`: what is printed, and what is refused."""

import json

import pytest

from torchelastic import cli

pytestmark = pytest.mark.needs("kubernetes")


def run(capsys, line):
    code = cli.main(line.split())
    return code, capsys.readouterr()


def test_a_dry_run_prints_what_kubectl_takes(capsys):
    import yaml

    line = "submit kubernetes --image i --nnodes 2:4 --dry-run -- /app/train_LM.py --lr 1"
    code, said = run(capsys, line)
    assert (code, said.err) == (0, "")
    secret, service, job = yaml.safe_load_all(said.out)
    assert [one["kind"] for one in (secret, service, job)] == ["Secret", "Service", "Job"]
    names = {one["metadata"]["name"] for one in (secret, service, job)}
    assert len(names) == 1
    assert names.pop().startswith("train-lm-")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-5:] == ["--nnodes=2:4", "--", "/app/train_LM.py", "--lr", "1"]


def test_as_json(capsys):
    line = "submit kubernetes --image i --name a --nnodes 2 --dry-run -o json train.py"
    code, said = run(capsys, line)
    assert code == 0
    assert len(json.loads(said.out)["items"]) == 3


def test_every_job_has_a_secret_of_its_own(capsys):
    line = "submit kubernetes --image i --name a --dry-run -o json train.py"
    first, second = (json.loads(run(capsys, line)[1].out)["items"][0] for _ in range(2))
    assert first["stringData"] != second["stringData"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("submit kubernetes train.py", "No --image given: name one"),
        ("submit kubernetes --image i", "No script given"),
        ("submit kubernetes --image i --name A_b train.py", "'A_b' is not a name for a Kubernetes"),
        ("submit kubernetes --image i --pod-template none.yaml train.py", "name a YAML file."),
        (
            "submit kubernetes --image i --health-port 8080 train.py",
            "--health-port is chosen by torchelastic submit kubernetes: remove it.",
        ),
        ("submit kubernetes --image i -o xml train.py", "'xml' is not a valid choice: write yaml"),
        ("scale", "Write a job and a number of nodes: torchelastic scale JOB N."),
        ("scale kubernetes:a 1 2", "Unexpected argument '2'"),
        ("delete kubernetes:a b", "Unexpected argument 'b'"),
        ("status kubernetes:A", "'kubernetes:A' is not a job: write kubernetes:NAME or"),
    ],
)
def test_what_is_refused_before_a_cluster_is_asked(capsys, line, sentence):
    code, said = run(capsys, line)
    assert (code, said.out) == (64, "")
    assert sentence in said.err


def test_logs_of_ranks_are_in_the_pods(capsys):
    code, said = run(capsys, "logs kubernetes:a --rank 0")
    assert code == 64
    assert "--rank needs the log files of a node: run `torchelastic logs` in a pod" in said.err
