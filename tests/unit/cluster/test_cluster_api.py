"""What an API server, or a proxy before it, answers, and what users read of it."""

from types import SimpleNamespace

import pytest

from torchelastic.cluster.kubernetes import cluster_api
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.errors import KubernetesError

#: As Kubernetes 1.38 writes them.
RBAC = 'jobs.batch is forbidden: User "u" cannot create resource "jobs" in API group "batch"'
QUOTA = 'jobs.batch "train" is forbidden: exceeded quota: q, requested: 1, used: 0, limited: 0'
WEBHOOK = 'admission webhook "policy.example" denied the request: no image from there'
ENDING = {"details": {"causes": [{"reason": "NamespaceTerminating"}]}}


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (401, {"message": "Unauthorized"}, "does not accept your credentials (Unauthorized): log"),
        (403, {"message": RBAC}, f"You are not allowed to do this ({RBAC}): ask for a Role"),
        (403, {"message": QUOTA}, f"The quota of the namespace is exceeded ({QUOTA}): ask"),
        (403, {"message": WEBHOOK}, f"A policy of the cluster forbids this ({WEBHOOK}): change"),
        (403, {"message": "x is forbidden", **ENDING}, "The namespace is being deleted (x is"),
        (404, {"message": 'namespaces "n" not found'}, "The namespace does not exist (name"),
        (500, {"message": "etcd timed out."}, "refused GET /x with status 500: etcd timed out."),
    ],
)
def test_a_refusal_is_one_sentence(status, answer, said):
    error = cluster_api._refused("GET", "/x", status, answer)
    assert said in str(error)
    assert error.status == status


@pytest.mark.needs("kubernetes")
def test_credentials_that_cannot_be_renewed():
    """Such as a token file that is gone: a sentence, as for any other request that fails."""

    def renew(headers, queries, settings):
        raise FileNotFoundError(2, "No such file or directory", "token")

    api = ClusterApi.__new__(ClusterApi)
    api.server, api._client = "https://c", SimpleNamespace(update_params_for_auth=renew)
    with pytest.raises(
        KubernetesError, match=r"for https://c cannot be renewed \(.*'token'\): log"
    ):
        api.get("/version")


@pytest.mark.parametrize("data", [b"", b"<html>Log in</html>", b'{"type": "ADD', b"[]"])
def test_what_no_api_server_answers(data):
    api = ClusterApi.__new__(ClusterApi)
    api.server = "https://c"
    with pytest.raises(KubernetesError, match="https://c does not answer as a Kubernetes API"):
        api._decoded(data)
