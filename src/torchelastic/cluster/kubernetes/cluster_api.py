"""The API of a Kubernetes cluster: objects as plain data, by their paths.

The official client finds the cluster and proves who we are: kubeconfig files, their credential
plug-ins, certificates, a pod's service account. Its classes for objects are not used: manifests are
data, those of custom resources, too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from torchelastic import env
from torchelastic.errors import ConfigError, KubernetesError

#: Seconds for a connection, and for an answer.
CONNECT_TIMEOUT, TIMEOUT = 5.0, 30.0
#: Where a pod finds the namespace it is in.
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
#: The kinds of patch, by the header that names them.
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

Json = dict[str, Any]


class ClusterApi:
    """One cluster, as one user. Raises `KubernetesError` whenever a request does not succeed.

    It never tries again: whoever calls decides that. Threads may share it.
    """

    def __init__(self, config_file: str = "") -> None:
        """Connect as a kubeconfig file says, or as the pod that this process runs in."""
        try:
            from kubernetes import client
        except ImportError:
            raise ConfigError(
                "The Python client of Kubernetes is not installed: pip install kubernetes."
            ) from None
        configuration = client.Configuration()
        #: The namespace of who has not named one.
        self.namespace = _load(configuration, config_file) or "default"
        self.server = str(configuration.host)
        self._client = client.ApiClient(configuration)

    def close(self) -> None:
        """Close the connections to the API server; a later request opens another one."""
        self._client.rest_client.pool_manager.clear()

    def get(self, path: str, **query: Any) -> Json:
        """Return an object, or a list of them: with its `items` and `metadata.resourceVersion`."""
        return self._json("GET", path, query)

    def create(self, path: str, body: Json, **query: Any) -> Json:
        """Create an object in the collection at `path`; return it as it is stored."""
        return self._json("POST", path, query, body)

    def replace(self, path: str, body: Json, **query: Any) -> Json:
        """Store an object; its `metadata.resourceVersion` must be the stored one's."""
        return self._json("PUT", path, query, body)

    def patch(self, path: str, body: Any, kind: str = MERGE_PATCH, **query: Any) -> Json:
        """Change a part of an object; return the whole."""
        return self._json("PATCH", path, query, body, kind)

    def delete(self, path: str, **options: Any) -> Json:
        """Delete an object with these DeleteOptions, such as `gracePeriodSeconds`."""
        return self._json("DELETE", path, {}, options or None)

    def watch(self, path: str, since: str, seconds: float, **query: Any) -> Iterator[Json]:
        """Yield the changes of a collection after the resource version `since`, for so long.

        Raises `KubernetesError` with the status 410 if that version is too old: list again.
        """
        query |= {"watch": "1", "resourceVersion": since, "allowWatchBookmarks": "true"}
        query["timeoutSeconds"] = max(1, round(seconds))
        for line in self.lines(path, timeout=seconds + TIMEOUT, **query):
            event = self._decoded(line)
            if event["type"] == "ERROR":
                raise _refused("GET", path, int(event["object"].get("code", 0)), event["object"])
            yield event

    def lines(self, path: str, timeout: float | None = None, **query: Any) -> Iterator[bytes]:
        """Yield the lines of an answer as they come: a watch, or a log."""
        response = self._call("GET", path, query, None, timeout=timeout)
        buffered = b""
        try:
            with _explained(self.server):
                for chunk in response.stream():
                    *whole, buffered = (buffered + chunk).split(b"\n")
                    yield from whole
            if buffered:
                yield buffered
        finally:
            response.close()

    def _json(
        self, method: str, path: str, query: Mapping[str, Any], body: Any = None, kind: str = ""
    ) -> Json:
        response = self._call(method, path, query, body, kind, TIMEOUT)
        return self._decoded(self._read(response))

    def _decoded(self, data: bytes) -> Json:
        """Return an object of an answer, which a proxy may have cut off or made up."""
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            return answer
        text = data[:80].decode("utf-8", "replace")
        raise KubernetesError(
            f"{self.server} does not answer as a Kubernetes API server does ({text!r}): check the "
            "address in KUBECONFIG, and proxies before it.",
            0,
        )

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any,
        kind: str = "",
        timeout: float | None = None,
    ) -> Any:
        from urllib3 import Timeout

        headers = {"Accept": "application/json, */*", "Content-Type": kind or "application/json"}
        self._add_credentials(headers)
        with _explained(self.server):
            response = self._client.rest_client.pool_manager.request(
                method,
                f"{self.server}{path}?{urlencode(query)}",
                headers=headers,
                body=None if body is None else json.dumps(body),
                timeout=Timeout(connect=CONNECT_TIMEOUT, read=timeout),
                retries=False,
                preload_content=False,
            )
        if response.status < 300:
            return response
        raise _refused(method, path, response.status, _answer(self._read(response)))

    def _add_credentials(self, headers: dict[str, str]) -> None:
        """Add the token, renewed if it is about to expire."""
        from kubernetes.config import ConfigException

        try:
            self._client.update_params_for_auth(headers, [], ["BearerToken"])
        except (ConfigException, OSError, ValueError) as error:
            raise KubernetesError(
                f"The credentials for {self.server} cannot be renewed ({error}): log in again, or "
                "check KUBECONFIG.",
                0,
            ) from None

    def _read(self, response: Any) -> bytes:
        """Read a whole answer; then its connection can be used again."""
        with _explained(self.server):
            try:
                data: bytes = response.read()
            except BaseException:
                response.close()
                raise
        response.release_conn()
        return data


def _load(configuration: Any, config_file: str) -> str:
    """Fill in how to reach the cluster; return the namespace of the context, if it has one."""
    from kubernetes import config
    from yaml import YAMLError

    environ = env.snapshot()
    file = config_file or environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    exists = any(map(os.path.exists, file.split(os.pathsep)))
    try:
        if not config_file and not exists and "KUBERNETES_SERVICE_HOST" in environ:
            config.load_incluster_config(client_configuration=configuration)
            return _OWN_NAMESPACE.read_text().strip()
        config.load_kube_config(config_file=file, client_configuration=configuration)
        _, active = config.list_kube_config_contexts(file)
    except (config.ConfigException, OSError, YAMLError) as error:
        raise ConfigError(
            f"No Kubernetes cluster: {file} does not name one ({error}). Set KUBECONFIG."
        ) from None
    return str(active["context"].get("namespace") or "")


@contextlib.contextmanager
def _explained(server: str) -> Iterator[None]:
    """Turn errors of the connection into ours."""
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (HTTPError, OSError) as error:
        # urllib3 begins with the connection that failed, as Python prints objects.
        raise _unreachable(server, str(error).rpartition(">: ")[2]) from None


def _unreachable(server: str, reason: str) -> KubernetesError:
    return KubernetesError(
        f"The Kubernetes API server {server} cannot be reached ({reason}): check the cluster and "
        "KUBECONFIG.",
        0,
    )


def _answer(data: bytes) -> Json:
    """The Status that an API server answers; a proxy before it may answer anything."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    return {"message": data.decode("utf-8", "replace").strip() or "no reason given"}


def _refused(method: str, path: str, status: int, answer: Json) -> KubernetesError:
    """Explain an answer of the API server."""
    message, reason = str(answer.get("message", "")).rstrip("."), str(answer.get("reason", ""))
    causes = answer.get("details", {}).get("causes", []) if answer.get("details") else []
    if status == 401:
        text = f"The cluster does not accept your credentials ({message}): log in again."
    elif status == 403 and "exceeded quota" in message:
        text = f"The quota of the namespace is exceeded ({message}): ask for less, or raise it."
    elif status == 403 and any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        text = f"The namespace is being deleted ({message}): use another one."
    elif status == 403 and " cannot " in message:
        text = f"You are not allowed to do this ({message}): ask for a Role that allows it."
    elif status == 403:
        text = f"A policy of the cluster forbids this ({message}): change the job, or the policy."
    elif status == 404 and message.startswith("namespaces "):
        text = f"The namespace does not exist ({message}): create it, or name another one."
    else:
        text = f"Kubernetes refused {method} {path} with status {status}: {message}."
    return KubernetesError(text, status, reason)
