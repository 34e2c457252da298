"""The pods that the controller of ElasticJobs makes."""

import pytest

from tests.unit.cluster.elastic_jobs import UID, elastic_job, pod_of
from torchelastic.cluster.operator import worker_pods
from torchelastic.cluster.operator.elastic_job import parse


def container_of(job, index=0):
    return worker_pods.pod(parse(job), index)["spec"]["containers"][0]


def test_the_launcher_gets_the_flags_that_0_2_gave_it():
    """But with a run id of its own for each job: in 0.2 a name could be used once."""
    assert container_of(elastic_job())["args"] == [
        "--rdzv_backend=etcd",
        "--rdzv_endpoint=etcd-service:2379",
        "--rdzv_id=imagenet-0c5a1f6e",
        "--nnodes=1:4",
        "train.py",
    ]


@pytest.mark.parametrize(
    ("least", "most", "endpoints"),
    [
        (1, 4, ["imagenet-worker-0.imagenet-0c5a1f6e:29400"]),
        (2, 2, ["imagenet-worker-0.imagenet-0c5a1f6e:29400"]),
        (2, 4, [f"imagenet-worker-{i}.imagenet-0c5a1f6e:29400" for i in range(3)]),
    ],
)
def test_without_etcd_the_pods_meet_at_each_other(least, most, endpoints):
    job = elastic_job(least=least, most=most)
    del job["spec"]["rdzvEndpoint"]
    assert container_of(job)["args"][:2] == [
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={','.join(endpoints)}",
    ]


def test_a_pod_goes_with_its_job_and_has_a_name_in_dns():
    made = worker_pods.pod(parse(elastic_job()), 3)
    metadata = made["metadata"]
    assert metadata["name"] == made["spec"]["hostname"] == "imagenet-worker-3"
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "elastic.pytorch.org/v1alpha1",
            "kind": "ElasticJob",
            "name": "imagenet",
            "uid": UID,
            "controller": True,
        }
    ]
    service = worker_pods.service(parse(elastic_job()))
    assert made["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= metadata["labels"].items()


@pytest.mark.parametrize(
    ("policy", "pods"),
    [
        ("ExitCode", "Never"),
        ("Never", "Never"),
        ("OnFailure", "OnFailure"),
        ("Always", "OnFailure"),
    ],
)
def test_the_restart_policy_of_a_pod(policy, pods):
    job = elastic_job(worker={"restartPolicy": policy})
    assert worker_pods.pod(parse(job), 0)["spec"]["restartPolicy"] == pods


def test_a_pod_has_the_secret_and_room_in_shared_memory():
    made = worker_pods.pod(parse(elastic_job()), 0)["spec"]
    variables = {each["name"]: each for each in made["containers"][0]["env"]}
    secret = worker_pods.with_secret(worker_pods.secret(parse(elastic_job())), "sesame")
    source = variables["TORCHELASTIC_SECRET"]["valueFrom"]["secretKeyRef"]
    assert source["name"] == secret["metadata"]["name"]
    assert secret["stringData"] == {source["key"]: "sesame"}
    assert made["volumes"] == [{"name": "torchelastic-shm", "emptyDir": {"medium": "Memory"}}]


def test_what_the_template_says_stays():
    template = {
        "metadata": {"labels": {"team": "vision"}, "annotations": {"a": "b"}},
        "spec": {
            "terminationGracePeriodSeconds": 120,
            "volumes": [{"name": "data", "emptyDir": {}}],
            "containers": [
                {
                    "name": "trainer",
                    "image": "train:1",
                    "env": [{"name": "TORCHELASTIC_SECRET", "value": "own"}],
                    "volumeMounts": [{"name": "data", "mountPath": "/dev/shm"}],
                },
                {"name": "sidecar", "image": "logs:1", "args": ["-f"]},
            ],
        },
    }
    made = worker_pods.pod(parse(elastic_job(template=template)), 0)
    trainer, sidecar = made["spec"]["containers"]
    assert made["metadata"]["labels"]["team"] == "vision"
    assert made["metadata"]["annotations"]["a"] == "b"
    variables = {each["name"]: each.get("value") for each in trainer["env"]}
    assert variables == {
        "TORCHELASTIC_SECRET": "own",
        "POD_UID": None,
        "PET_SHUTDOWN_TIMEOUT": "118",
    }
    assert [each["name"] for each in made["spec"]["volumes"]] == ["data"]
    assert sidecar == {"name": "sidecar", "image": "logs:1", "args": ["-f"]}
    assert len(template["spec"]["containers"][0]["env"]) == 1, "the template is not changed"


def running_beside(job, code, policy):
    """A pod whose trainer has ended, while a sidecar runs."""
    pod = pod_of(job, 0, code=code)
    pod["status"]["phase"] = "Running"
    pod["spec"]["restartPolicy"] = policy
    return pod


@pytest.mark.parametrize(
    ("code", "policy", "verdict"),
    [
        (0, "Never", "complete"),
        (0, "OnFailure", "complete"),
        (1, "Never", "failure"),
        (1, "OnFailure", None),  # the kubelet starts it again
        (64, "OnFailure", "fatal"),
        (143, "Never", "interruption"),
    ],
)
def test_the_first_container_counts(code, policy, verdict):
    end = worker_pods.ended(running_beside(elastic_job(), code, policy))
    assert (end and end.verdict) == verdict


def test_a_sidecar_that_is_injected_before_the_trainer_does_not_count():
    pod = pod_of(elastic_job(), 0, code=0)
    pod["status"]["phase"] = "Running"
    pod["spec"]["containers"].insert(0, {"name": "istio-proxy"})
    proxy = {"name": "istio-proxy", "state": {"running": {}}}
    pod["status"]["containerStatuses"].insert(0, proxy)
    end = worker_pods.ended(pod)
    assert (end and end.verdict) == "complete"


def test_a_container_that_the_kubelet_starts_in_vain_is_fatal():
    pod = pod_of(elastic_job(), 0)
    last = {"terminated": {"exitCode": 64, "reason": "Error", "message": "wrong flag"}}
    state = {"waiting": {"reason": "CrashLoopBackOff"}}
    pod["status"]["containerStatuses"] = [
        {"name": "elasticjob-worker", "state": state, "lastState": last}
    ]
    end = worker_pods.ended(pod)
    assert end is not None
    assert (end.verdict, end.cause) == ("fatal", "exit code 64: wrong flag")


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("", "exit code 1"),
        ("starting\nkilled by hand\n\n", "exit code 1: killed by hand"),
        (
            "torchelastic run: error: Script 'a.py' not found.\n",
            "exit code 1: Script 'a.py' not found",
        ),
        # The end of a report.
        (
            "  exitcode  : 1 (pid: 6890)\n  error     : ValueError: broken 0\n"
            "  traceback : Traceback (most recent call last):\n------\n"
            "No other failures.\n======\n",
            "exit code 1: ValueError: broken 0",
        ),
    ],
)
def test_the_cause_is_the_line_of_the_output_that_tells_it(output, cause):
    end = worker_pods.ended(pod_of(elastic_job(), 0, code=1, message=output))
    assert end is not None
    assert end.cause == cause
