"""The doctor on real things: ports, rendezvous, etcds, disks, networks; and its jobs on the CPU."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import late_backend
from tests.etcd import FAST, running
from tests.ports import free_port
from tests.process.test_etcd import PASSWORD, want_logins
from tests.process.test_rendezvous_serve import Server
from torchelastic.config import LaunchConfig
from torchelastic.doctor import (
    endpoints,
    gpu_jobs,
    this_machine,
    torch_check,
)
from torchelastic.doctor.finding import Severity

ROOT = Path(__file__).parents[2]
SECRET, OTHER = "0123456789abcdef0123456789abcdef", "another secret that is long enough"

#: A Python that says at once what the probe would say after importing torch.
STUB = """\
#!/bin/sh
echo '{"python": "3.11.7", "torch": "2.13.0", "place": "/torch/__init__.py", "seconds": 0.1,' \
     '"built_for": "", "nccl": "", "gloo": ""}'
"""


def launch(endpoint, **more):
    return LaunchConfig(2, 2, rdzv_endpoint=endpoint, run_id=more.pop("run_id", "job"), **more)


# --- the rendezvous ------------------------------------------------------------------------------


def test_a_free_port_of_this_machine_is_free_afterwards():
    port = free_port()
    (found,) = endpoints.rendezvous(launch(f"localhost:{port}"))
    assert found.verdict is Severity.OK
    assert "this node will host" in found.found
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.fixture
def patient(monkeypatch):
    """Where an answer comes, a busy machine may take its time."""
    monkeypatch.setattr(endpoints, "ANSWER_TIMEOUT", 60.0)


def test_a_port_that_something_silent_has():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (found,) = endpoints.rendezvous(launch(f"127.0.0.1:{listener.getsockname()[1]}"))
    assert found.verdict is Severity.FAULT
    assert "does not answer as a rendezvous" in found.found


def test_a_port_of_another_protocol(patient):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak():
            caller, _ = listener.accept()
            with caller:
                caller.recv(65536)
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                caller.recv(65536)

        speaker = threading.Thread(target=speak)
        speaker.start()
        (found,) = endpoints.rendezvous(launch(f"127.0.0.1:{listener.getsockname()[1]}"))
        speaker.join()
    assert found.verdict is Severity.FAULT
    assert "other than a torchelastic rendezvous" in found.found


def test_another_machine_where_nobody_listens_yet_is_not_checked(patient):
    found = endpoints.rendezvous(
        launch(f"127.0.0.1:{free_port()}", rdzv_configs={"is_host": "0"})  # as if it were another
    )
    assert [finding.verdict for finding in found] == [Severity.NOT_CHECKED]


def test_a_name_that_nobody_knows_is_a_fault():
    (found,) = endpoints.rendezvous(launch("nobody.invalid:29400"))
    assert found.verdict is Severity.FAULT
    assert "'nobody.invalid'" in found.found


@pytest.fixture
def served(tmp_path):
    """A rendezvous of job `job` with a secret, as a process of its own: its endpoint."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    flags = ["--rdzv-id=job", f"--rdzv-secret-file={tmp_path}/secret"]
    server = Server(tmp_path, 0, *flags).start()
    yield f"127.0.0.1:{server.port}"
    server.stop(signal.SIGKILL)


def test_a_rendezvous_lets_us_in_by_the_secret_and_the_job(served, tmp_path, monkeypatch, patient):
    file = str(tmp_path / "secret")
    (found,) = endpoints.rendezvous(launch(served, rdzv_secret_file=file))
    assert (found.verdict, "Job 'job' at" in found.found) == (Severity.OK, True)
    (found,) = endpoints.rendezvous(launch(served, rdzv_secret_file=file, run_id="other"))
    assert (found.verdict, "belongs to job 'job'" in found.found) == (Severity.FAULT, True)
    (found,) = endpoints.rendezvous(launch(served))
    assert (found.verdict, "this node has none" in found.found) == (Severity.FAULT, True)
    monkeypatch.setenv("TORCHELASTIC_SECRET", OTHER)
    (found,) = endpoints.rendezvous(launch(served))
    assert (found.verdict, "different secret" in found.found) == (Severity.FAULT, True)


def test_a_secret_is_judged_as_the_agent_judges_it(tmp_path):
    file = tmp_path / "secret"
    config = launch("node1:29400", rdzv_secret_file=str(file))
    assert [found.verdict for found in endpoints.secret(config)] == [Severity.FAULT]
    file.write_text(SECRET)
    file.chmod(0o644)
    (found,) = endpoints.secret(config)
    assert (found.verdict, "chmod 600" in found.found) == (Severity.WARNING, True)
    file.chmod(0o600)
    assert [found.verdict for found in endpoints.secret(config)] == [Severity.OK]
    (found,) = endpoints.secret(launch("node1:29400"))
    assert (found.verdict, "no secret" in found.found) == (Severity.WARNING, True)


# --- etcd ----------------------------------------------------------------------------------------


def at(endpoint, **conf):
    return launch(endpoint, rdzv_backend="etcd", rdzv_configs=conf)


def test_a_real_etcd_keeps_a_lease_and_has_nothing_of_us_afterwards(etcd, patient):
    prefix = "/doctor-of-tests"
    (found,) = endpoints.etcd(at(etcd.endpoint, etcd_prefix=prefix))
    # How long it takes is the machine's affair.
    assert found.verdict in (Severity.OK, Severity.WARNING)
    assert f"etcd at {etcd.endpoint}" in found.found
    everything = etcd.post("/v3/kv/range", {"key": "AA==", "range_end": "AA==", "keys_only": True})
    keys = json.dumps([row["key"] for row in everything.get("kvs", [])])
    assert "L2RvY3Rvci1vZi10ZXN0c" not in keys  # how the prefix begins, as etcd writes it


def test_an_etcd_that_asks_who_we_are(patient, tmp_path):
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    who = {"etcd_user": "trainer", "etcd_password_file": str(password)}
    with running(*FAST) as etcd:
        want_logins(etcd, "trainer")
        (found,) = endpoints.etcd(at(etcd.endpoint, **who))
        assert found.verdict in (Severity.OK, Severity.WARNING)
        found = endpoints.etcd(at(etcd.endpoint, **who, etcd_prefix="/elsewhere"))[-1]
        assert (found.verdict, "the user needs a role" in found.found) == (Severity.FAULT, True)
        password.write_text("wrong")
        found = endpoints.etcd(at(etcd.endpoint, **who))[-1]
        assert (found.verdict, "rejected user 'trainer'" in found.found) == (Severity.FAULT, True)


def test_an_etcd_that_is_not_there_or_is_none(monkeypatch):
    monkeypatch.setattr(endpoints, "ANSWER_TIMEOUT", 0.1)
    (found,) = endpoints.etcd(at(f"127.0.0.1:{free_port()}"))
    assert (found.verdict, "No etcd answered" in found.found) == (Severity.FAULT, True)


def test_an_etcd_of_the_jobs_own(etcd_on_path, monkeypatch):
    config = LaunchConfig(rdzv_backend="etcd", rdzv_endpoint="localhost:0", run_id="job")
    (found,) = endpoints.etcd(config)
    assert (found.verdict, etcd_on_path in found.found) == (Severity.OK, True)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", "/nowhere/etcd")
    assert [found.verdict for found in endpoints.etcd(config)] == [Severity.FAULT]


# --- what the agent opens besides ----------------------------------------------------------------


def test_an_address_that_is_taken_is_a_warning_since_the_job_goes_on():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        (found,) = endpoints.listeners(LaunchConfig(dashboard=taken))
        assert (found.verdict, taken in found.found) == (Severity.WARNING, True)
    (found,) = endpoints.listeners(LaunchConfig(dashboard=f"localhost:{free_port()}"))
    assert found.verdict is Severity.OK
    assert endpoints.listeners(LaunchConfig(dashboard="auto")) == []


def test_doctor_reports_refusals_in_the_words_of_the_agent(tmp_path):
    (found,) = endpoints.listeners(LaunchConfig(event_log_handler="nobody"))
    assert (found.verdict, "does not know 'nobody'" in found.found) == (Severity.FAULT, True)
    missing = LaunchConfig(dashboard="auto", dashboard_token_file=str(tmp_path / "none"))
    (found,) = endpoints.listeners(missing)
    assert (found.verdict, "--dashboard-token-file" in found.found) == (Severity.FAULT, True)


# --- disks and networks --------------------------------------------------------------------------


def in_python(source, *command):
    """The JSON that a program prints under a command that changes its surroundings."""
    made = subprocess.run([*command, sys.executable, "-c", source], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


@pytest.mark.needs("mount")
def test_a_full_disk_is_a_fault(tmp_path):
    source = f"""
import json, subprocess
from torchelastic.doctor import this_machine
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", {str(tmp_path)!r}], check=True)
empty = this_machine.directory(this_machine.space_in({str(tmp_path)!r}), "log")
with open({str(tmp_path / "big")!r}, "wb") as file:
    try:
        file.write(bytes(8 << 20))
    except OSError:
        pass
full = this_machine.directory(this_machine.space_in({str(tmp_path)!r}), "log")
print(json.dumps([empty.to_json(), full.to_json()]))
"""
    empty, full = in_python(source, "unshare", "--mount")
    assert (empty["verdict"], "Only 4.0 MiB" in empty["found"]) == ("fault", True)
    assert (full["verdict"], "No space left on device" in full["found"]) == ("fault", True)


@pytest.mark.needs("namespaces")
def test_a_machine_without_a_network_cannot_be_one_of_two():
    source = """
import json
from torchelastic.config import LaunchConfig
from torchelastic.doctor import network
name = network.own_name()
verdicts = [
    network.name(name, LaunchConfig(2, 2, rdzv_endpoint="node1")).verdict.value,
    network.interfaces({"GLOO_SOCKET_IFNAME": "eth0"}, network.interface_names(),
                       LaunchConfig(), gpus=False)[0].verdict.value,
]
print(json.dumps([name.outward, *verdicts]))
"""
    assert in_python(source, "unshare", "--net") == [None, "fault", "fault"]


def test_a_directory_that_cannot_be_written(tmp_path):
    assert this_machine.space_in(str(tmp_path)).trouble == ""
    assert "No such file" in this_machine.space_in(str(tmp_path / "none")).trouble
    assert list(tmp_path.glob("[!.]*")) == []


# --- torch ---------------------------------------------------------------------------------------


def test_the_torch_of_workers_makes_a_group():
    told, gloo = torch_check.check(sys.executable, dict(os.environ), gpus=0)
    assert (told.verdict, gloo.verdict) == (Severity.OK, Severity.OK)
    assert told.found.startswith("torch 2.")


def test_a_python_that_is_not_there(tmp_path):
    (found,) = torch_check.check(str(tmp_path / "python"), dict(os.environ), gpus=0)
    assert (found.verdict, "No such file" in found.found) == (Severity.FAULT, True)


def test_a_python_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('none of that name here')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (found,) = torch_check.check(sys.executable, env, gpus=0)
    assert (found.verdict, "none of that name here" in found.found) == (Severity.FAULT, True)


# --- the whole -----------------------------------------------------------------------------------


def doctor(directory, *argv, **environ):
    python = directory / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    return subprocess.run(
        [sys.executable, "-m", "torchelastic", "doctor", *argv],
        cwd=directory,
        env={**os.environ, "PYTHON_EXEC": str(python), **environ},
        capture_output=True,
        text=True,
    )


def test_a_launch_without_faults_ends_with_0_and_leaves_nothing(tmp_path):
    (tmp_path / "train.py").write_text("")
    ended = doctor(tmp_path, "--json", "--log-dir", "logs", "train.py")
    picture = json.loads(ended.stdout)
    assert (ended.returncode, ended.stderr, picture["fault"]) == (0, "", False)
    checks = [finding["check"] for finding in picture["findings"]]
    for check in ("script", "times", "kernel", "memory", "name", "rendezvous", "torch", "clock"):
        assert check in checks
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["python", "train.py"]


def test_a_fault_ends_with_1_and_says_what_run_would_say(tmp_path):
    ended = doctor(tmp_path, "missing.py")
    text = " ".join(ended.stdout.split())
    assert ended.returncode == 1
    assert "Script 'missing.py' not found" in text
    assert re.search(r"\n1 fault, .* ok\.\n$", ended.stdout)


def test_the_gpu_paths_cannot_be_asked_for_without_one(tmp_path):
    ended = doctor(tmp_path, "--gpu", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 64
    assert "not checked  gpu              This machine has no GPU" in ended.stdout


# --- the jobs of --gpu, on the CPU ---------------------------------------------------------------


def test_a_path_that_is_not_done_in_time_hangs_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(gpu_jobs, "PATH_TIMEOUT", 0.3)
    found = gpu_jobs.take(gpu_jobs.PATHS[0], "cpu", 1, dict(os.environ)).finding
    assert (found.verdict, "hung" in found.found) == (Severity.FAULT, True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_path_that_does_not_work_says_why():
    taken = gpu_jobs.take(gpu_jobs.PATHS[0], "cuda", 1, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert taken.finding.verdict is Severity.FAULT
    assert taken.finding.found.startswith("CUDA in a forked worker does not work: ")
    assert "Traceback (most recent call last)" in taken.traceback
    assert any(name.endswith("events.jsonl") for name in taken.logs)


#: Paths that have no back end, or must work with the one that has no habits of NCCL's.
ON_GLOO = ("zygote", "snapshot")


@pytest.mark.alone  # who hangs is judged by how soon the others answer
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", gpu_jobs.PATHS, ids=lambda way: way.name)
def test_each_path_works_on_the_cpu(way, monkeypatch):
    """The lines that `doctor --gpu` runs with CUDA and NCCL, which import torch."""
    monkeypatch.setattr(
        gpu_jobs, "PATH_TIMEOUT", 280.0
    )  # on a machine that is busy with other tests
    late = f"{late_backend.__name__}:{late_backend.NAME}"
    environ = {
        **os.environ,
        "PET_NNODES": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    taken = gpu_jobs.take(way, "cpu", 2, environ, "" if way.name in ON_GLOO else late)
    assert taken.finding.verdict is Severity.OK, taken
