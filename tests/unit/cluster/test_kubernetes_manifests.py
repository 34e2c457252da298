"""The objects of a job on Kubernetes, and the merge of pod templates, by table."""

import doctest

import pytest

from tests.pods import expanded
from torchelastic.cluster.submit import kubernetes_manifests
from torchelastic.cluster.submit.kubernetes_manifests import (
    KubernetesJob,
    check_name,
    endpoints,
    manifests,
    merged,
    pod_template,
)
from torchelastic.errors import ConfigError


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
def test_what_a_template_may_be(data, expected):
    assert pod_template(data, "pod.yaml") == expected


@pytest.mark.parametrize("data", [None, [], "x", {}, {"containers": []}, {"spec": []}])
def test_what_is_not_a_pod_is_refused(data):
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
