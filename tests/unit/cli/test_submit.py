"""`torchelastic submit`: what is printed, written and refused."""

import json

import pytest

from torchelastic import cli
from torchelastic.cli.command_table import SUBMIT_RAY
from torchelastic.cli.commands.submit import ray_config, ray_resources
from torchelastic.cli.parser import parse
from torchelastic.errors import ConfigError

kubernetes = pytest.mark.needs("kubernetes")


def run(capsys, line):
    code = cli.main(line.split())
    return code, capsys.readouterr()


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def test_a_dry_run_prints_the_script_and_makes_nothing(train, capsys):
    line = "--nnodes 2:4 --nproc-per-node 8 --sbatch-option=--qos=high --dry-run -- train.py --lr 1"
    code, said = run(capsys, "submit slurm " + line)
    assert code == 0
    assert "#SBATCH --nodes=2-4\n" in said.out
    assert "#SBATCH --qos=high\n" in said.out
    assert "torchelastic run --nnodes=2:4 --nproc-per-node=8 -- train.py --lr 1\n" in said.out
    assert [path.name for path in train.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("flags", "decides"),
    [
        ("--nnodes 2", True),
        ("--nnodes 1", False),
        ("--nnodes 2 --witness /w", False),
        ("--nnodes 2 --quorum none", False),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e", False),
    ],
)
def test_the_jobs_directory_decides_between_halves_unless_something_else_does(
    train, capsys, flags, decides
):
    _, said = run(capsys, f"submit slurm {flags} --dry-run train.py")
    assert ("PET_WITNESS" in said.out) == decides


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--nnodes 2", "No script given"),
        ("gone.py", "Script 'gone.py' not found"),
        ("--sbatch-option qos=x train.py", "--sbatch-option 'qos=x' is not an option of sbatch"),
    ],
)
def test_slurm_bad_command_is_refused(train, capsys, line, sentence):
    code, said = run(capsys, "submit slurm " + line)
    assert (code, said.out) == (64, "")
    assert f"torchelastic submit slurm: error: {sentence}" in said.err


def test_without_slurm_it_says_so(train, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, said = run(capsys, "submit slurm --job-dir job train.py")
    assert code == 64
    assert "sbatch not found: run this where Slurm is installed" in said.err
    assert not (train / "job").exists(), "the same command is refused the next time"


def test_a_job_that_slurm_refuses_leaves_nothing(train, capsys, monkeypatch):
    sbatch = train / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{train}:/bin:/usr/bin")
    code, said = run(capsys, "submit slurm --job-dir job train.py")
    assert code == 64
    assert "sbatch refused the job: invalid partition." in said.err
    assert not (train / "job").exists()


@kubernetes
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


@kubernetes
def test_as_json(capsys):
    line = "submit kubernetes --image i --name a --nnodes 2 --dry-run -o json train.py"
    code, said = run(capsys, line)
    assert code == 0
    assert len(json.loads(said.out)["items"]) == 3


@kubernetes
def test_every_job_has_a_secret_of_its_own(capsys):
    line = "submit kubernetes --image i --name a --dry-run -o json train.py"
    first, second = (json.loads(run(capsys, line)[1].out)["items"][0] for _ in range(2))
    assert first["stringData"] != second["stringData"]


@kubernetes
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
def test_kubernetes_bad_command_is_refused_before_the_cluster_is_asked(capsys, line, sentence):
    code, said = run(capsys, line)
    assert (code, said.out) == (64, "")
    assert sentence in said.err


@kubernetes
def test_logs_of_ranks_are_in_the_pods(capsys):
    code, said = run(capsys, "logs kubernetes:a --rank 0")
    assert code == 64
    assert "--rank needs the log files of a node: run `torchelastic logs` in a pod" in said.err


def parsed(flags: str):
    return parse([*flags.split(), "train.py"], SUBMIT_RAY, {})


@pytest.mark.parametrize(
    ("flags", "resources", "shape"),
    [
        ("", {}, (1, 1, 1)),
        ("--nnodes 2:4 --nproc-per-node 2", {}, (2, 4, 2)),
        ("-j 2:4x2 --num-gpus 4", {"GPU": 4}, (2, 4, 2)),
        ("--nnodes 2 --num-gpus 4 --num-cpus 8", {"CPU": 8, "GPU": 4}, (2, 2, 4)),
        ('--resources {"rack":0.5}', {"rack": 0.5}, (1, 1, 1)),
    ],
)
def test_resources_and_shape(flags, resources, shape):
    found = parsed(flags)
    assert ray_resources(found) == resources
    config = ray_config(found, resources)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == shape


def test_other_flags_and_the_name():
    config = ray_config(parsed("--nnodes 2 --max-restarts 3 --rdzv-id job-1"), {})
    assert (config.max_restarts, config.run_id) == (3, "job-1")
    assert ray_config(parsed("--nnodes 2"), {}).run_id == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rdzv-endpoint node1", "--rdzv-endpoint is chosen by torchelastic submit ray"),
        ("--standalone", "--standalone is chosen"),
        ("--nproc-per-node gpu", "counts the devices of this machine"),
    ],
)
def test_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        ray_config(parsed(flags), {})


@pytest.mark.parametrize("text", ["rack", "[1]", '{"rack": "many"}', '{"rack": -1}'])
def test_resources_that_are_none(text):
    with pytest.raises(ConfigError):
        parse(["--resources", text, "train.py"], SUBMIT_RAY, {})


def test_a_dry_run_prints_the_command(capsys):
    line = "--image img --nnodes 2:4 --job-dir /shared --dry-run -- /app/train_lm.py --lr 1"
    code, said = run(capsys, "submit runai " + line)
    assert (code, said.err) == (0, "")
    assert said.out == (
        "runai training pytorch submit train-lm --image img --no-master --workers 4 "
        "--min-replicas 2 --max-replicas 4 -e TORCHELASTIC_JOB_DIR=/shared/train-lm "
        "--command -- torchelastic run --nnodes=2:4 -- /app/train_lm.py --lr 1\n"
    )


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ("--nnodes 2", True),
        ("--nnodes 1", False),
        ("--nnodes 2 --job-dir /shared", False),
        ("--nnodes 2 --rdzv-secret-file /run/job/secret", False),
    ],
)
def test_a_job_without_a_secret_is_reported(capsys, flags, warns):
    _, said = run(capsys, f"submit runai --image img --dry-run {flags} train.py")
    assert ("The job has no secret" in said.err) == warns


@pytest.mark.parametrize("code", [0, 3])
def test_the_program_is_run_and_its_exit_code_returned(tmp_path, monkeypatch, capfd, code):
    runai = tmp_path / "runai"
    runai.write_text(f'#!/bin/sh\necho "$3 $4"\nexit {code}\n')
    runai.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cli.main(["submit", "runai", "--image", "img", "train.py"]) == code
    assert capfd.readouterr().out == "submit train\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train.py", "No --image given: name one"),
        ("--image img", "No script given"),
        ("--image img train.py", "runai not found: install Run:ai's command line"),
    ],
)
def test_runai_bad_command_is_refused(tmp_path, monkeypatch, capsys, line, sentence):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = run(capsys, "submit runai " + line)
    assert (code, said.out) == (64, "")
    assert f"torchelastic submit runai: error: {sentence}" in said.err
