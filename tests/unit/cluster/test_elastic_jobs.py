"""ElasticJobs: what is to be done for one, its pods, and which controller acts."""

import random
from copy import deepcopy

import pytest

from tests.unit.cluster.elastic_jobs import NOW, UID, elastic_job, pod_of
from torchelastic.cluster.operator import leader_lease, worker_pods
from torchelastic.cluster.operator.elastic_job import condition, holds, parse, stamp
from torchelastic.cluster.operator.leader_lease import Seen, given_up, may_take, seen, taken
from torchelastic.cluster.operator.reconcile import JobPlan, reconcile, refused


def names(objects):
    return [each["metadata"]["name"] for each in objects if each["kind"] == "Pod"]


def reasons(plan):
    return [event.reason for event in plan.events]


def accepted(**given):
    """A job that the controller has seen, whose status is up to date for no pods."""
    job = elastic_job(**given)
    plan = reconcile(job, [], NOW)
    assert plan.status is not None
    return {**job, "status": plan.status}


def after(job, pods, now=NOW):
    """The plan, and the job with its new status."""
    plan = reconcile(job, pods, now)
    return plan, {**job, "status": plan.status or job["status"]}


def test_a_new_job_gets_a_secret_a_service_and_its_pods():
    plan = reconcile(elastic_job(replicas=2), [], NOW)
    assert plan.secret["metadata"]["name"] == "imagenet-0c5a1f6e"
    assert plan.create[0]["kind"] == "Service"
    assert names(plan.create) == ["imagenet-worker-0", "imagenet-worker-1"]
    assert plan.status["startTime"] == stamp(NOW)
    assert plan.status["nnodes"] == "1:4"
    assert holds(plan.status, "Created")
    assert reasons(plan) == ["ElasticJobCreated"]


def test_a_job_that_has_what_it_wants_is_left_alone():
    job = accepted()
    pods = [pod_of(job, 0), pod_of(job, 1)]
    plan, job = after(job, pods)
    assert reasons(plan) == ["ElasticJobRunning"]
    assert job["status"]["replicaStatuses"]["Worker"] == {"active": 2, "succeeded": 0, "failed": 0}
    assert reconcile(job, pods, NOW + 100) == JobPlan()


@pytest.mark.parametrize(
    ("replicas", "present", "created", "deleted"),
    [
        (4, {0: {}, 1: {}}, [2, 3], []),
        (3, {0: {}, 2: {}}, [1], []),
        (1, {0: {}, 1: {}, 2: {}, 3: {}}, [], [3, 2, 1]),
        (9, {0: {}, 1: {}}, [2, 3], []),  # no more than maxReplicas
        (0, {0: {}, 1: {}}, [], [1]),  # no fewer than minReplicas
        (1, {0: {"phase": "Pending"}, 1: {}}, [], [0]),  # what does not run goes first
        (1, {0: {}, 1: {"deleted": NOW + 30}}, [], []),  # one leaves already
    ],
)
def test_the_number_of_pods_follows_replicas(replicas, present, created, deleted):
    job = accepted(replicas=replicas)
    plan = reconcile(job, [pod_of(job, index, **more) for index, more in present.items()], NOW)
    assert names(plan.create) == [f"imagenet-worker-{index}" for index in created]
    assert plan.delete == [(f"imagenet-worker-{index}", f"pod-{index}") for index in deleted]


def test_a_number_outside_of_the_range_is_told_once():
    job = elastic_job(replicas=9)
    plan, job = after(job, [])
    assert "replicas 9 is outside 1:4" in plan.events[-1].message
    assert plan.events[-1].warning
    assert reasons(reconcile(job, [], NOW)) == []


PREEMPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}
EVICTED = {"reason": "Evicted", "message": "The node was low on memory."}


@pytest.mark.parametrize(
    ("end", "status", "failures", "said"),
    [
        *(({"code": code}, {}, 0, f"exit code {code}") for code in (137, 143, 170, 171)),
        ({"code": 137, "reason": "OOMKilled"}, {}, 1, "exit code 137"),
        ({"code": 1}, PREEMPTED, 0, ""),
        ({"phase": "Failed"}, EVICTED, 0, "(Evicted): The node was low on memory."),
    ],
)
def test_an_ended_worker_is_replaced_and_charged_for_its_own_failures(end, status, failures, said):
    job = accepted()
    pod = pod_of(job, 1, **end)
    pod["status"] |= status
    plan, job = after(job, [pod_of(job, 0), pod])
    assert plan.delete == [("imagenet-worker-1", "pod-1")]
    assert said in plan.events[0].message
    assert job["status"]["workers"][0]["failures"] == failures
    assert holds(job["status"], "Restarting")
    assert names(reconcile(job, [pod_of(job, 0)], NOW).create) == ["imagenet-worker-1"]
    _, job = after(job, [pod_of(job, 0), pod_of(job, 1, uid="new")])
    assert not holds(job["status"], "Restarting")


def test_a_worker_that_keeps_ending_waits_longer_and_longer():
    job = accepted()
    now, waits = NOW, []
    for start in range(5):
        pods = [pod_of(job, 0), pod_of(job, 1, code=143, uid=f"start-{start}")]
        plan, job = after(job, pods, now)
        waits.append((plan.again_at or now) - now)
        now += waits[-1]
        assert reconcile(job, pods, now).delete == [("imagenet-worker-1", f"start-{start}")]
    assert waits == [0, 10, 20, 40, 80]


def test_a_long_run_makes_earlier_ends_forgotten():
    job = accepted()
    for start in range(3):
        _, job = after(job, [pod_of(job, 0), pod_of(job, 1, code=1, uid=f"start-{start}")])
    times = {"startedAt": stamp(NOW), "finishedAt": stamp(NOW + 3600)}
    plan, job = after(job, [pod_of(job, 0), pod_of(job, 1, code=1, uid="long", **times)])
    assert job["status"]["workers"][0]["failures"] == 1
    assert plan.delete == [("imagenet-worker-1", "long")]


def test_a_pod_is_counted_once():
    job = accepted()
    pods = [pod_of(job, 0), pod_of(job, 1, code=1)]
    _, job = after(job, pods)
    again, _ = after(job, pods)
    assert again.status is None
    assert again.events == []


def fail(job, index, times):
    """Let a worker fail so often, for a cause of its own."""
    pods = [pod_of(job, each) for each in range(2) if each != index]
    for start in range(times):
        plan, job = after(job, [*pods, pod_of(job, index, code=1, uid=f"start-{start}")])
    return plan, job


def test_a_worker_beyond_its_limit_is_given_up_but_not_the_job():
    """At least minReplicas can still run; its index is not used again."""
    plan, job = fail(accepted(least=1, most=2, backoffLimit=2), 1, times=3)
    assert not holds(job["status"], "Failed")
    assert plan.delete == plan.create == []
    assert reasons(plan) == ["WorkerGivenUp"]
    words = "Giving up imagenet-worker-1, which ended with exit code 1: backoffLimit is 2."
    assert words in str(plan.events)
    assert not holds(job["status"], "Restarting"), "all that are left are running"
    plan, job = fail(accepted(least=2, most=3, backoffLimit=2), 1, times=3)
    assert not holds(job["status"], "Failed")
    assert names(plan.create) == ["imagenet-worker-2"]


def test_a_job_that_lost_a_worker_for_good_can_be_scaled_down():
    _, job = fail(accepted(replicas=3, least=2, most=3, backoffLimit=2), 1, times=3)
    job["spec"]["replicaSpecs"]["Worker"]["replicas"] = 2
    plan, job = after(job, [pod_of(job, index) for index in (0, 2)])
    assert not holds(job["status"], "Failed")
    assert plan.delete == []
    assert plan.create == []


def test_the_job_fails_when_fewer_than_the_minimum_are_left():
    plan, job = fail(accepted(least=2, most=2, backoffLimit=2), 1, times=3)
    assert condition(job["status"], "Failed")["reason"] == "BackoffLimitExceeded"
    assert "Worker 1 failed 3 times, last with exit code 1" in plan.events[-1].message
    assert job["status"]["completionTime"] == stamp(NOW)


def test_an_error_that_no_start_can_fix_ends_the_job():
    job = accepted()
    end = {"message": "Traceback\nImportError: no module named x\n"}
    plan, job = after(job, [pod_of(job, 0), pod_of(job, 1, code=64, **end)])
    failed = condition(job["status"], "Failed")
    assert failed["reason"] == "UserError"
    assert "exit code 64: ImportError: no module named x. No other start" in failed["message"]
    assert plan.delete == []
    assert plan.create == []


def test_a_deleted_pod_is_replaced_when_it_is_gone():
    job = accepted()
    leaving = [pod_of(job, 0), pod_of(job, 1, deleted=NOW + 30)]
    plan = reconcile(job, leaving, NOW)
    assert plan.create == plan.delete == []
    assert plan.again_at == NOW + 60
    assert names(reconcile(job, [pod_of(job, 0)], NOW).create) == ["imagenet-worker-1"]


@pytest.mark.parametrize("most", [4, 2], ids=["a number is free", "all numbers are in use"])
def test_a_pod_on_a_lost_node_is_replaced_under_another_name(most):
    """The object cannot be gone before its node is back, and holds its name until then."""
    job = accepted(most=most)
    pods = [pod_of(job, 0), pod_of(job, 1, deleted=NOW)]
    assert reconcile(job, pods, NOW + 29).create == []
    assert names(reconcile(job, pods, NOW + 30).create) == ["imagenet-worker-2"]
    assert reconcile(job, [*pods, pod_of(job, 2)], NOW + 40).create == []
    # Later the node is back, and the pod goes.
    assert reconcile(job, [pods[0], pod_of(job, 2)], NOW + 50).create == []


QUOTA = ("QuotaExceeded", "The quota is exceeded.")
FORBIDDEN = ("Forbidden", "You are not allowed.")


def test_refused_creation_is_tried_again_after_a_pause():
    """Each try writes the status, and with it would come the next."""
    job = accepted()
    job["status"] = refused(job["status"], *QUOTA, NOW)
    assert condition(job["status"], "Stalled")["message"] == "The quota is exceeded."
    soon = reconcile(job, [], NOW + 9)
    assert (soon.create, soon.again_at) == ([], NOW + 10)
    assert names(reconcile(job, [], NOW + 10).create) == ["imagenet-worker-0", "imagenet-worker-1"]
    again = refused(job["status"], *QUOTA, NOW + 10)
    assert reconcile({**job, "status": again}, [], NOW + 19).create == []
    assert condition(again, "Stalled")["lastTransitionTime"] == stamp(NOW)
    _, job = after(job, [pod_of(job, 0), pod_of(job, 1)], NOW + 11)
    assert not holds(job["status"], "Stalled")
    new = elastic_job()
    new["status"] = refused({}, *QUOTA, NOW)
    assert reconcile(new, [], NOW + 9).secret is None
    assert reconcile(new, [], NOW + 10).secret is not None


def test_refused_deletion_is_tried_again_after_a_pause_and_quota_delays_none():
    job = accepted(replicas=1)
    pods = [pod_of(job, 0), pod_of(job, 1)]
    job["status"] = refused(job["status"], *FORBIDDEN, NOW)
    soon, _ = after(job, pods, NOW + 9)
    assert (soon.delete, soon.again_at) == ([], NOW + 10)
    later, job = after(job, pods, NOW + 10)
    assert later.delete == [("imagenet-worker-1", "pod-1")]
    assert holds(job["status"], "Stalled"), "until it is done"
    _, job = after(job, pods[:1], NOW + 11)
    assert not holds(job["status"], "Stalled")
    job = accepted(replicas=3)
    job["status"] = refused(job["status"], *QUOTA, NOW)
    plan = reconcile(job, [pod_of(job, 0), pod_of(job, 1, code=143)], NOW + 1)
    assert (plan.delete, plan.create) == ([("imagenet-worker-1", "pod-1")], [])


def test_refused_deletion_of_an_ended_job_is_tried_again_after_a_pause():
    job = accepted(ttlSecondsAfterFinished=0)
    _, job = after(job, [pod_of(job, 0, code=0)])
    assert reconcile(job, [], NOW).delete_job
    job["status"] = refused(job["status"], *FORBIDDEN, NOW)
    soon = reconcile(job, [], NOW + 9)
    assert (soon.delete_job, soon.again_at) == (False, NOW + 10)
    assert reconcile(job, [], NOW + 10).delete_job


def test_the_first_success_ends_the_job_and_others_may_end_by_themselves():
    job = accepted(ttlSecondsAfterFinished=3600)
    pods = [pod_of(job, 0, code=0), pod_of(job, 1)]
    plan, job = after(job, pods)
    assert holds(job["status"], "Succeeded")
    assert not holds(job["status"], "Running")
    assert plan.delete == []
    soon = reconcile(job, pods, NOW + 29)
    assert soon.delete == []
    assert soon.again_at == NOW + 30
    later = reconcile(job, pods, NOW + 30)
    assert later.delete == [("imagenet-worker-1", "pod-1")]
    assert not later.delete_job
    assert reconcile(job, pods, NOW + 3600).delete_job


@pytest.mark.parametrize(("policy", "deleted"), [("Running", [1]), ("All", [0, 1]), ("None", [])])
def test_pods_that_are_left(policy, deleted):
    job = accepted(cleanPodPolicy=policy)
    pods = [pod_of(job, 0, code=0), pod_of(job, 1)]
    _, job = after(job, pods)
    plan = reconcile(job, pods, NOW + 60)
    assert [uid for _, uid in plan.delete] == [f"pod-{index}" for index in deleted]


def test_a_job_beyond_its_time_limit_is_stopped_at_once():
    job = accepted(activeDeadlineSeconds=100)
    pods = [pod_of(job, 0), pod_of(job, 1)]
    assert reconcile(job, pods, NOW + 99).again_at == NOW + 100
    _, job = after(job, pods, NOW + 100)
    assert condition(job["status"], "Failed")["reason"] == "DeadlineExceeded"
    assert len(reconcile(job, pods, NOW + 100).delete) == 2


def test_a_job_that_ended_or_is_being_deleted_gets_no_pods():
    job = accepted()
    _, over = after(job, [pod_of(job, 0, code=0)])
    over["spec"]["replicaSpecs"]["Worker"]["replicas"] = 4
    assert reconcile(over, [pod_of(job, 0, code=0)], NOW).create == []
    job = accepted()
    job["metadata"]["deletionTimestamp"] = stamp(NOW)
    assert reconcile(job, [], NOW) == JobPlan()


def test_pods_of_an_earlier_job_of_that_name_are_not_its_own():
    """Their names are used when they are gone."""
    job = accepted(replicas=2)
    other = deepcopy(job)
    other["metadata"]["uid"] = "other"
    plan = reconcile(job, [pod_of(other, 0, code=64)], NOW)
    assert names(plan.create) == ["imagenet-worker-1"]
    assert plan.delete == []
    assert names(reconcile(job, [pod_of(job, 1)], NOW).create) == ["imagenet-worker-0"]


def test_edited_labels_and_made_up_pods_change_nothing():
    job = accepted()
    stranger = pod_of(job, 7)
    stranger["metadata"]["name"] = "imagenet-worker-x"
    unlabelled = [pod_of(job, 0), pod_of(job, 1), stranger]
    for pod in unlabelled:
        pod["metadata"]["labels"] = {}
    plan = reconcile(job, unlabelled, NOW)
    assert plan.create == plan.delete == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"least": 3, "most": 2}, "minReplicas 3 and maxReplicas 2 allow no number of nodes"),
        ({"template": {"spec": {}}}, "template has no container"),
    ],
)
def test_a_spec_that_cannot_be_run_is_told_once_and_nothing_is_made(changes, sentence):
    plan, job = after(elastic_job(**changes), [])
    assert sentence in condition(job["status"], "Stalled")["message"]
    assert reasons(plan) == ["InvalidSpec"]
    assert plan.create == []
    assert reconcile(job, [], NOW) == JobPlan()


def test_a_name_too_long_for_a_pod_is_refused():
    job = elastic_job()
    job["metadata"]["name"] = "n" * 60
    plan = reconcile(job, [], NOW)
    assert "choose one of at most 54 lower-case letters" in plan.events[0].message


def test_the_range_is_that_of_the_running_agents():
    """Without minReplicas and maxReplicas, both are the replicas of the beginning."""
    job = elastic_job(replicas=2)
    del job["spec"]["minReplicas"], job["spec"]["maxReplicas"]
    _, job = after(job, [])
    assert job["status"]["nnodes"] == "2:2"
    job["spec"]["replicaSpecs"]["Worker"]["replicas"] = 3
    assert names(reconcile(job, [], NOW).create) == ["imagenet-worker-0", "imagenet-worker-1"]


class Cluster:
    """An API server, a kubelet and a controller that forgets everything between two decisions."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now, self.started = NOW, 0
        self.job = elastic_job(replicas=3, least=2, most=4)
        self.pods = {}

    def step(self):
        self.now += self.random.choice([0, 1, 10, 60])
        plan = reconcile(deepcopy(self.job), deepcopy(list(self.pods.values())), self.now)
        todo = [("status", plan.status)] if plan.status else []
        todo += [("delete", each) for each in plan.delete]
        todo += [("create", each) for each in plan.create if each["kind"] == "Pod"]
        # It may be killed after any of them.
        for verb, what in todo[: self.random.randint(0, len(todo))]:
            if verb == "status":
                self.job["status"] = what
            elif verb == "delete":
                self.pods.pop(what[0], None)
            else:
                assert what["metadata"]["name"] not in self.pods, "created twice"
                self.started += 1
                what["metadata"]["uid"] = f"start-{self.started}"
                self.pods[what["metadata"]["name"]] = {**what, "status": {"phase": "Running"}}
        assert len(self.pods) <= 4

    def disturb(self):
        kind = self.random.choice(["delete", "interrupt", "scale", "nothing"])
        if kind == "scale":
            worker = self.job["spec"]["replicaSpecs"]["Worker"]
            worker["replicas"] = self.random.randint(0, 6)
            self.job["metadata"]["generation"] += 1
        elif kind != "nothing" and self.pods:
            name = self.random.choice(sorted(self.pods))
            if kind == "delete":
                del self.pods[name]
            else:
                index = int(name[-1])
                uid = self.pods[name]["metadata"]["uid"]
                self.pods[name] = pod_of(self.job, index, code=143, uid=uid)


@pytest.mark.parametrize("seed", range(50))
def test_a_controller_killed_anywhere_brings_the_job_to_what_is_wanted(seed):
    cluster = Cluster(seed)
    for _ in range(30):
        cluster.disturb()
        cluster.step()
        assert not holds(cluster.job["status"], "Failed"), "nodes can still run"
    for _ in range(200):
        cluster.step()
    wanted = min(max(cluster.job["spec"]["replicaSpecs"]["Worker"]["replicas"], 2), 4)
    running = [pod for pod in cluster.pods.values() if pod["status"]["phase"] == "Running"]
    assert len(running) == len(cluster.pods) == wanted


# --- pods -----------------------------------------------------------------------------------------


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


def test_pod_keeps_the_settings_of_its_template():
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


@pytest.mark.parametrize(
    "injected", [False, True], ids=["sidecar after", "sidecar injected before"]
)
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
def test_pod_has_ended_when_its_trainer_has_though_a_sidecar_runs(code, policy, verdict, injected):
    pod = pod_of(elastic_job(), 0, code=code)
    pod["status"]["phase"] = "Running"
    pod["spec"]["restartPolicy"] = policy
    if injected:
        pod["spec"]["containers"].insert(0, {"name": "istio-proxy"})
        proxy = {"name": "istio-proxy", "state": {"running": {}}}
        pod["status"]["containerStatuses"].insert(0, proxy)
    end = worker_pods.ended(pod)
    assert (end and end.verdict) == verdict


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


# --- leadership -----------------------------------------------------------------------------------


def lease(holder="a", version="1"):
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15}
    return {"metadata": {"resourceVersion": version}, "spec": spec}


@pytest.mark.parametrize(
    ("holder", "age", "allowed"),
    [("a", 0, True), ("b", 0, False), ("b", 14.9, False), ("b", 15, True), ("", 0, True)],
)
def test_a_lease_is_taken_when_nobody_renews_it(holder, age, allowed):
    last = Seen(version="1", since=100.0)
    assert may_take(lease(holder), "a", last, 100.0 + age) is allowed


def test_a_renewal_starts_the_time_anew():
    first = seen(lease(version="1"), None, 100.0)
    assert seen(lease(version="1"), first, 110.0).since == 100.0
    assert seen(lease(version="2"), first, 110.0).since == 110.0


def test_lease_names_the_holder_that_took_it():
    renewed = taken(taken({}, "a", 0.0), "a", 5.0)["spec"]
    assert renewed["acquireTime"] == "1970-01-01T00:00:00.000000Z"
    assert renewed["renewTime"] == "1970-01-01T00:00:05.000000Z"
    assert renewed["leaseTransitions"] == 0
    other = taken(lease("a"), "b", 9.0)
    assert other["spec"]["leaseTransitions"] == 1
    assert may_take(given_up(other), "c", Seen(version="1", since=0.0), 0.0)


def test_a_leader_stops_before_another_begins():
    assert leader_lease.ACT_FOR + 4 < leader_lease.DURATION
