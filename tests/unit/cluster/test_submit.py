"""Jobs as schedulers take them: Kubernetes' own objects and other kinds, sbatch, runai."""

import doctest
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.pods import expanded
from torchelastic.cli.command_table import KUBERNETES_KINDS
from torchelastic.cluster.job_directory import JobDirectory
from torchelastic.cluster.kubernetes.job_summary import nnodes_of
from torchelastic.cluster.submit import kubernetes_manifests, slurm_script
from torchelastic.cluster.submit.job_kinds import JOB_KINDS
from torchelastic.cluster.submit.kubernetes_manifests import (
    KubernetesJob,
    check_name,
    endpoints,
    manifests,
    merged,
    pod_template,
)
from torchelastic.cluster.submit.runai_command import RunaiJob, words
from torchelastic.cluster.submit.slurm_script import SlurmJob, script
from torchelastic.errors import ConfigError

# --- Kubernetes -----------------------------------------------------------------------------------


def job(**fields):
    given = {"name": "train", "image": "i:1", "min_nodes": 2, "max_nodes": 4, "secret": "s"}
    return KubernetesJob(**{**given, "arguments": ["--nnodes=2:4", "--", "train.py"], **fields})


def spec_of(**fields):
    return manifests(job(**fields))[2]["spec"]


def container_of(**fields):
    return spec_of(**fields)["template"]["spec"]["containers"][0]


def variables_of(**fields):
    return {one["name"]: one.get("value") for one in container_of(**fields)["env"]}


def test_doctests_hold():
    assert doctest.testmod(kubernetes_manifests).failed == 0


def test_lost_pods_do_not_end_the_job_and_a_wrong_script_does():
    spec = spec_of()
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimitPerIndex"] == 3
    assert "backoffLimit" not in spec, "a few lost pods would end the job"
    rules = [(rule["action"], str(rule)) for rule in spec["podFailurePolicy"]["rules"]]
    assert [action for action, _ in rules] == ["FailJob", "Ignore", "Ignore"]
    for (_, text), part in zip(rules, ("[64]", "DisruptionTarget", "[143]"), strict=True):
        assert part in text
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert spec["podReplacementPolicy"] == "Failed"


@pytest.mark.parametrize(("least", "most", "spare"), [(2, 4, 2), (2, 2, 0), (1, 1, 0), (1, 8, 7)])
def test_a_job_fails_only_when_fewer_than_min_nodes_can_run(least, most, spare):
    spec = spec_of(min_nodes=least, max_nodes=most)
    assert (spec["parallelism"], spec["maxFailedIndexes"]) == (most, spare)
    # All nodes succeed at the same time: there is still an index that has not ended.
    assert spec["completions"] > spare + most


@pytest.mark.parametrize(
    ("least", "most", "count"), [(1, 1, 1), (1, 8, 1), (2, 2, 1), (2, 3, 3), (3, 3, 3), (5, 9, 3)]
)
def test_min_nodes_are_a_majority_of_the_endpoints(least, most, count):
    assert endpoints(least, most) == count
    assert least > count // 2
    told = variables_of(min_nodes=least, max_nodes=most)
    assert told["JOB_ENDPOINTS"] == str(count)


def test_names_are_published_before_a_pod_is_ready():
    secret, service, made = manifests(job(namespace="team"))
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert made["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert {one["metadata"]["namespace"] for one in (secret, service, made)} == {"team"}


def test_the_secret_is_only_in_the_secret_and_the_api_is_not_asked():
    secret, *others = manifests(job(secret="sesame"))
    assert secret["stringData"] == {"secret": "sesame"}
    assert "sesame" not in str(others)
    pod = others[1]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod


def test_variables_in_arguments_are_the_users():
    """Kubernetes replaces `$(X)` by a variable and `$$` by `$`, wherever they are."""
    given = ["$(X)", "$$(X)", "$Y", "$$"]
    made = container_of(arguments=["--", "a.py", *given])["args"][-4:]
    assert made == ["$$(X)", "$$$$(X)", "$$Y", "$$$$"]
    assert [expanded(word, {"X": "no"}) for word in made] == given


def test_the_agent_knows_the_grace_period_of_the_template():
    assert variables_of()["POD_GRACE_SECONDS"] == "30"
    told = {"spec": {"terminationGracePeriodSeconds": 120}}
    assert variables_of(pod_template=told)["POD_GRACE_SECONDS"] == "120"
    assert spec_of(pod_template=told)["template"]["spec"]["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize(
    ("base", "template", "expected"),
    [
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"a": 2, "b": 3}, {"a": 2, "b": 3}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        # Lists with a key are merged, others are replaced.
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
            {"env": [{"name": n, "value": v} for n, v in (("A", "1"), ("B", "3"), ("C", "4"))]},
        ),
        # Ports need no names, and two without are two.
        (
            {"ports": [{"name": "health", "containerPort": 1}]},
            {"ports": [{"containerPort": 2}, {"containerPort": 3}, {"containerPort": 1}]},
            {
                "ports": [
                    {"name": "health", "containerPort": 1},
                    {"containerPort": 2},
                    {"containerPort": 3},
                ]
            },
        ),
        ({"env": []}, {"env": [{"value": "1"}, "x"]}, {"env": [{"value": "1"}, "x"]}),
        ({"env": []}, {"env": [{"name": ["A"]}]}, {"env": [{"name": ["A"]}]}),
        ({"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": []}, {"tolerations": []}),
        (
            {"containers": [{"name": "x", "volumeMounts": [{"mountPath": "/a", "name": "v"}]}]},
            {"containers": [{"name": "x", "volumeMounts": [{"mountPath": "/b", "name": "w"}]}]},
            {
                "containers": [
                    {
                        "name": "x",
                        "volumeMounts": [
                            {"mountPath": "/a", "name": "v"},
                            {"mountPath": "/b", "name": "w"},
                        ],
                    }
                ]
            },
        ),
        (
            {},
            {"volumes": [{"name": "d", "emptyDir": {}}]},
            {"volumes": [{"name": "d", "emptyDir": {}}]},
        ),
    ],
)
def test_a_template_is_merged(base, template, expected):
    assert merged(base, template) == expected


def test_a_sidecar_stays_beside_the_container_of_the_job():
    told = {"spec": {"containers": [{"name": "proxy", "image": "p"}]}}
    containers = spec_of(pod_template=told)["template"]["spec"]["containers"]
    assert [one["name"] for one in containers] == ["torchelastic", "proxy"]


POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "labels": {"a": "b"}}}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"spec": {"a": 1}}, {"spec": {"a": 1}}),
        ({**POD, "spec": {}}, {"spec": {}, "metadata": {"labels": {"a": "b"}}}),
        ({"kind": "PodTemplate", "template": {"spec": {"a": 1}}}, {"spec": {"a": 1}}),
    ],
)
def test_pod_template_may_be_a_pod_or_a_part_of_one(data, expected):
    assert pod_template(data, "pod.yaml") == expected


@pytest.mark.parametrize("data", [None, [], "x", {}, {"containers": []}, {"spec": []}])
def test_pod_template_that_is_not_a_pod_is_refused(data):
    with pytest.raises(ConfigError, match=r"--pod-template pod\.yaml is not a pod: write its spec"):
        pod_template(data, "pod.yaml")


@pytest.mark.parametrize("containers", [{"name": "x"}, ["x"], "x"])
def test_containers_are_a_list_of_objects(containers):
    with pytest.raises(ConfigError, match=r"pod\.yaml: spec\.containers is a list, of which each"):
        pod_template({"spec": {"containers": containers}}, "pod.yaml")


def test_a_container_of_another_name_needs_an_image():
    """Whoever writes `main` means the job's, most likely."""
    pod_template({"spec": {"containers": [{"name": "proxy", "image": "p"}]}}, "pod.yaml")
    for wrong in ({"name": "main", "resources": {}}, {"resources": {}}):
        with pytest.raises(ConfigError, match=r"has no image\. The container of the job is named"):
            pod_template({"spec": {"containers": [wrong]}}, "pod.yaml")


def test_metadata_that_is_not_an_object_is_refused():
    with pytest.raises(ConfigError, match=r"pod\.yaml: metadata is an object"):
        pod_template({"metadata": "labels", "spec": {}}, "pod.yaml")


@pytest.mark.parametrize(("given", "seconds"), [(0, "0"), ("2m", "30"), (None, "30")])
def test_a_grace_period_that_is_not_a_number_is_left_to_the_cluster(given, seconds):
    told = {"spec": {"terminationGracePeriodSeconds": given}}
    assert variables_of(pod_template=told)["POD_GRACE_SECONDS"] == seconds


def test_a_field_that_no_pod_has_is_named():
    with pytest.raises(ConfigError, match="has the unknown field 'sepc'"):
        pod_template({"spec": {}, "sepc": {}}, "pod.yaml")


@pytest.mark.parametrize("name", ["a", "train-1", "a" * 56])
def test_names_that_kubernetes_takes(name):
    check_name(name)


@pytest.mark.parametrize("name", ["", "Train", "1train", "train_1", "-a", "a-", "a" * 57, "a.b"])
def test_names_that_it_does_not(name):
    with pytest.raises(
        ConfigError, match="is not a name for a Kubernetes job: give a --name of at most 56"
    ):
        check_name(name)


# --- other kinds of resources ---------------------------------------------------------------------


GPUS = {"resources": {"limits": {"nvidia.com/gpu": 8}}}


def train_job(**changes):
    given = {
        "name": "train",
        "image": "registry/train:1",
        "min_nodes": 2,
        "max_nodes": 4,
        "arguments": ["--nnodes=2:4", "--", "train.py", "--lr=1"],
        "secret": "s" * 64,
    }
    return KubernetesJob(**(given | changes))


def rendered(kind, **changes):
    """The job itself, which is the last object."""
    return JOB_KINDS[kind].manifests(train_job(**changes))[-1]


def first_container(template):
    return template["spec"]["containers"][0]


def variables(container):
    return {each["name"]: each for each in container["env"]}


def test_every_kind_of_the_command_line_is_rendered():
    assert tuple(JOB_KINDS) == KUBERNETES_KINDS


@pytest.mark.parametrize("kind", KUBERNETES_KINDS)
def test_every_kind_has_the_command_the_secret_and_the_namespace(kind):
    """The user's command, a secret that is not in the job, and the namespace."""
    objects = JOB_KINDS[kind].manifests(train_job(namespace="team"))
    assert {each["metadata"]["namespace"] for each in objects} == {"team"}
    text = str(objects[-1])
    assert "'--nnodes=2:4', '--', 'train.py', '--lr=1'" in text
    assert "'torchelastic', 'run'" in text
    assert "s" * 64 not in text
    secrets = [each for each in objects if each["kind"] == "Secret"]
    assert len(secrets) == (kind != "elasticjob")  # its controller makes one


@pytest.mark.parametrize("kind", sorted(set(KUBERNETES_KINDS) - {"trainjob"}))
def test_a_pod_template_is_merged_in(kind):
    template = {
        "spec": {"containers": [{"name": "torchelastic", **GPUS}], "nodeSelector": {"a": "b"}}
    }
    text = str(rendered(kind, pod_template=template))
    assert str(GPUS["resources"]) in text
    assert "'nodeSelector': {'a': 'b'}" in text


def test_a_jobset_has_an_indexed_job_whose_pods_keep_the_run_id():
    spec = rendered("jobset")["spec"]
    indexed = spec["replicatedJobs"][0]["template"]["spec"]
    assert (indexed["parallelism"], indexed["maxFailedIndexes"]) == (4, 2)
    source = variables(first_container(indexed["template"]))["JOB_UID"]["valueFrom"]
    assert source["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
    assert spec["network"]["subdomain"] == indexed["template"]["spec"]["subdomain"]


def test_a_pytorchjob_has_an_elastic_policy_and_the_container_that_its_operator_looks_for():
    spec = rendered("pytorchjob")["spec"]
    assert spec["elasticPolicy"] == {"minReplicas": 2, "maxReplicas": 4, "rdzvBackend": "c10d"}
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (4, "ExitCode")
    container = first_container(worker["template"])
    assert container["name"] == "pytorch"
    assert "readinessProbe" not in container, "nodes find each other only when they are ready"


@pytest.mark.parametrize("kind", ["pytorchjob", "volcano"])
def test_a_job_that_reuses_a_name_is_another_run(kind):
    ids = {
        str(rendered(kind, secret=secret)).partition("'value': 'train-")[2][:8] for secret in "ab"
    }
    assert len(ids) == 2


def test_a_trainjob_refers_to_the_runtime_and_takes_resources_only():
    template = {"spec": {"containers": [{"name": "torchelastic", **GPUS}]}}
    spec = rendered("trainjob", pod_template=template)["spec"]
    assert spec["runtimeRef"] == {"name": "torchelastic"}
    assert spec["trainer"]["numNodes"] == 4
    assert spec["trainer"]["resourcesPerNode"] == GPUS["resources"]
    with pytest.raises(ConfigError, match="put the rest into the ClusterTrainingRuntime"):
        rendered("trainjob", pod_template={"spec": {**template["spec"], "nodeSelector": {}}})


def test_a_volcano_job_is_a_gang_of_min_and_ends_with_the_first_success():
    spec = rendered("volcano")["spec"]
    assert (spec["minAvailable"], spec["minSuccess"]) == (2, 1)
    (task,) = spec["tasks"]
    assert task["replicas"] == 4
    assert task["policies"][0] == {"exitCode": 64, "action": "TerminateJob"}
    assert spec["plugins"]["svc"] == ["--publish-not-ready-addresses"]


def test_an_elasticjob_leaves_secret_and_names_to_its_controller():
    spec = rendered("elasticjob")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
    template = spec["replicaSpecs"]["Worker"]["template"]
    assert "subdomain" not in template["spec"]
    assert [each["name"] for each in template["spec"]["volumes"]] == ["shm"]
    assert not any("secret" in word for word in first_container(template)["args"])


@pytest.mark.parametrize("kind", ["job", "jobset", "pytorchjob", "trainjob"])
def test_kueue_admits_the_whole_job(kind):
    made = rendered(kind, queue="team-queue")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    elastic = made["metadata"].get("annotations", {}).get("kueue.x-k8s.io/elastic-job")
    assert (elastic == "true") == (kind == "job")


def test_kueue_admits_the_pods_of_an_elasticjob_and_volcano_has_queues_of_its_own():
    made = rendered("elasticjob", queue="team-queue")
    pods = made["spec"]["replicaSpecs"]["Worker"]["template"]["metadata"]["labels"]
    assert pods == {"kueue.x-k8s.io/queue-name": "team-queue"}
    made = rendered("volcano", queue="team-queue")
    assert made["spec"]["queue"] == "team-queue"
    assert "kueue.x-k8s.io/queue-name" not in made["metadata"]["labels"]


@pytest.mark.parametrize(
    ("kind", "longest"),
    [
        ("job", 56),
        ("jobset", 49),
        ("trainjob", 49),
        ("pytorchjob", 49),
        ("elasticjob", 49),
        ("volcano", 51),
    ],
)
def test_a_name_too_long_for_its_pods_is_refused(kind, longest):
    rendered(kind, name="n" * longest)
    with pytest.raises(ConfigError, match=f"at most {longest} lower-case"):
        rendered(kind, name="n" * (longest + 1))


@pytest.mark.parametrize("kind", KUBERNETES_KINDS)
def test_the_commands_about_a_job_find_what_was_rendered(kind):
    """Its shape, its number of nodes, its pods, and the objects beside it."""
    *others, made = JOB_KINDS[kind].manifests(train_job(queue="team"))
    known = JOB_KINDS[kind]
    assert (made["apiVersion"], made["kind"]) == (known.api_version, known.kind)
    assert nnodes_of(made) == (2, 4)
    assert known.nodes_of(made) == 4
    assert tuple(each["kind"] for each in others) == known.others
    assert f"'matchLabels': {{'{known.pod_label}': 'train'}}" in str(made) or kind == "trainjob"


def test_pods_of_an_elasticjob_are_not_taken_for_those_of_a_job():
    selector = JOB_KINDS["elasticjob"].pods_of("train")
    assert selector == "job-name=train,group-name=elastic.pytorch.org"


# --- Slurm ----------------------------------------------------------------------------------------


def slurm_job(**changes):
    given = {
        "name": "train.py",
        "directory": "/shared/job 1",
        "min_nodes": 2,
        "max_nodes": 4,
        "command": ["python", "-m", "torchelastic", "run", "--", "train.py", "a b"],
        "notice": 120,
    }
    return SlurmJob(**(given | changes))


def options(made):
    marked = [line for line in made.splitlines() if line.startswith("#SBATCH ")]
    return [line.removeprefix("#SBATCH ") for line in marked]


def run(directory, wanted, *, SLURM_JOB_ID="", SLURM_ARRAY_JOB_ID="", **programs):
    """Run the script with these programs in place of Slurm's."""
    for name, text in programs.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    numbers = {"SLURM_JOB_ID": SLURM_JOB_ID, "SLURM_ARRAY_JOB_ID": SLURM_ARRAY_JOB_ID}
    environ = {"PATH": f"{directory}:/usr/bin:/bin", **numbers}
    return subprocess.run(
        ["bash", "-c", script(wanted)], env=environ, capture_output=True, text=True
    )


def test_a_lost_node_does_not_end_the_job_and_a_limit_is_announced():
    made = script(slurm_job(time="4:00:00", partition="gpu", options=["--gpus-per-node=8"]))
    assert options(made) == [
        "--job-name=train.py",
        "--nodes=2-4",
        "--exclusive",
        "--no-kill",
        "--requeue",
        "--open-mode=append",
        "--signal=TERM@120",
        "--output='/shared/job 1/slurm-%j.out'",
        "--time=4:00:00",
        "--partition=gpu",
        "--gpus-per-node=8",
    ]
    assert "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0" in made
    assert "torchelastic run -- train.py 'a b'" in made


def test_a_job_array_has_a_task_for_each_node():
    made = script(slurm_job(array=True))
    assert "--nodes=1" in options(made)
    assert "--array=0-3" in options(made)
    assert "--output='/shared/job 1/slurm-%A_%a.out'" in options(made)
    assert "export PET_RDZV_ID=$SLURM_ARRAY_JOB_ID" in made
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"' in made


@pytest.mark.parametrize("cpus", ["--cpus-per-task=8", "-c 8"])
def test_slurm_script_takes_whole_nodes_unless_cpus_are_given(cpus):
    assert "--exclusive" in options(script(slurm_job(array=True, options=["--comment=c"])))
    assert "--exclusive" not in options(script(slurm_job(options=[cpus])))


@pytest.mark.parametrize(
    ("running", "endpoint"),
    [
        ("2026-11-17T12:00:01 n1", "n1:29434"),
        ("2026-11-17T12:00:09 n1\n2026-11-17T12:00:01 n7", "n7:29434,n1:29434"),
        ("\n".join(f"2026-11-17T12:00:0{n} n{n}" for n in range(5)), "n0:29434,n1:29434,n2:29434"),
    ],
)
def test_the_tasks_of_an_array_find_each_other(tmp_path, running, endpoint):
    """The script's own lines, with a squeue that shows these tasks, once it answers."""
    squeue = f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; exit 1; }}"
    done = run(
        tmp_path,
        slurm_job(array=True, finds_tasks=True, directory=str(tmp_path)),
        squeue=f"{squeue}\ncat <<'END'\n{running}\nEND",
        srun="echo endpoint=$PET_RDZV_ENDPOINT",
        sleep="",
        SLURM_ARRAY_JOB_ID="1034",
    )
    told = "squeue shows no task of job 1034: asking again in 5 s."
    assert done.stdout.splitlines() == [told, f"endpoint={endpoint}"], done.stderr
    assert "squeue" not in script(slurm_job(array=True))


def test_a_task_that_starts_after_the_job_has_failed_does_not_start_it_again(tmp_path):
    """It has only waited for its node. Otherwise each task would fail once more."""
    (tmp_path / "failed").write_text("64")
    done = run(tmp_path, slurm_job(array=True, directory=str(tmp_path)), srun="echo started")
    assert done.returncode == 64
    assert "The job has failed: this task does not start it again." in done.stdout
    assert "started" not in done.stdout


def test_a_job_has_more_time_than_notice():
    assert doctest.testmod(slurm_script).failed == 0
    with pytest.raises(ConfigError, match="is not longer than --notice 120 s"):
        script(slurm_job(time="2"))
    script(slurm_job(time="3"))


def test_a_directory_is_not_a_pattern_of_slurm():
    assert "--output=/a%%j/slurm-%j.out" in options(script(slurm_job(directory="/a%j")))


def test_every_start_has_a_witness_of_its_own():
    made = script(slurm_job(witness=True))
    assert 'PET_WITNESS="$TORCHELASTIC_JOB_DIR/witness-${SLURM_RESTART_COUNT:-0}"' in made
    assert "WITNESS" not in script(slurm_job())


def test_an_option_needs_its_dashes():
    for wrong in ("gpus=8", "--a\nrm -rf /"):
        with pytest.raises(ConfigError, match="is not an option of sbatch"):
            script(slurm_job(options=[wrong]))


@pytest.mark.parametrize(
    ("left", "srun", "code", "requeued"),
    [
        ("finished", 143, 0, False),
        ("finished", 0, 0, False),
        ("failed", 143, 64, False),
        ("", 143, 143, True),
        ("", 137, 137, True),
        ("", 171, 171, True),
        ("", 64, 64, False),
        ("", 1, 1, False),
    ],
)
def test_script_ends_or_requeues_by_its_exit_code(tmp_path, left, srun, code, requeued):
    """With stand-ins for srun and scontrol: what they do is in tests/process/test_slurm.py."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "failed").write_text("1")  # of an earlier start
    done = run(
        tmp_path,
        slurm_job(directory=str(tmp_path / "job")),
        srun=f'[ -z "{left}" ] || echo 64 > "$TORCHELASTIC_JOB_DIR/{left}"; exit {srun}',
        scontrol=f'echo "$*" > {tmp_path}/asked',
        SLURM_JOB_ID="7",
    )
    assert done.returncode == code, done
    asked = Path(tmp_path, "asked")
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if requeued else "")


# --- Run:ai ---------------------------------------------------------------------------------------


def runai_words(**changes):
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
    assert runai_words(**changes) == expected


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
def test_runai_job_with_wrong_options_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        runai_words(**changes)


# --- the directory of a job on shared storage -----------------------------------------------------


def test_only_its_owner_can_read_the_secret(tmp_path):
    made = JobDirectory.create(tmp_path / "jobs" / "one")
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert made.secret.stat().st_mode & 0o777 == 0o600
    assert len(made.secret.read_text().strip()) == 64
    other = JobDirectory.create(tmp_path / "jobs" / "two")
    assert other.secret.read_text() != made.secret.read_text()


def test_an_existing_directory_is_not_used_again(tmp_path):
    with pytest.raises(ConfigError, match="exists already: name another one"):
        JobDirectory.create(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Cannot create .* \(Not a directory\)"):
        JobDirectory.create(tmp_path / "file" / "job")


def test_node_that_starts_after_the_end_is_too_late(tmp_path):
    made = JobDirectory.create(tmp_path / "job")
    assert made.why_too_late("7") == ""
    made.note_finished("7", 120)
    made.note_finished("7", 120)
    assert made.why_too_late("7") == (
        "Job '7' finished at step 120: this node is too late and has nothing to do."
    )
    assert made.why_too_late("8") == "", "another job in the same directory"
    made.note_finished("7", -1)
    assert "finished: this node" in made.why_too_late("7")
    assert {path.name for path in made.path.iterdir()} == {"secret", "finished"}
    for wrong in ("", "3", '{"job": "7"}', '{"job": "7", "step": null}'):
        (made.path / "finished").write_text(wrong)
        assert made.why_too_late("7") == ""


def test_the_first_node_makes_what_is_missing(tmp_path):
    it = JobDirectory(tmp_path / "jobs" / "one")
    with ThreadPoolExecutor(8) as nodes:
        list(nodes.map(lambda _: it.prepare(), range(8)))
    secret = it.secret.read_text()
    assert len(secret.strip()) == 64
    assert it.path.stat().st_mode & 0o777 == 0o700
    assert it.secret.stat().st_mode & 0o777 == 0o600
    it.prepare()
    assert it.secret.read_text() == secret
    assert [path.name for path in it.path.iterdir()] == ["secret"]
