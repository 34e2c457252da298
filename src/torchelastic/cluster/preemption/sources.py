"""How to ask each platform whether this machine or pod is about to be taken away.

`ask` returns a `Notice` or None. It raises `OSError`, `WireError` or `ValueError` if the platform
did not answer or answered something else, and `NotWatched` if asking again is pointless.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from torchelastic.cluster.preemption import notices
from torchelastic.cluster.preemption.notices import Notice
from torchelastic.transport.http_client import fetch

AWS_URL = "http://169.254.169.254"
GCP_URL = "http://metadata.google.internal"
AZURE_URL = "http://169.254.169.254"
#: Where Kubernetes puts a pod's credentials.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

#: Seconds for an answer. Azure's first one starts a service and may take minutes.
TIMEOUT, AZURE_FIRST_TIMEOUT = 2.0, 150.0
#: Seconds that an AWS token is valid for; it is renewed when it is rejected.
TOKEN_LIFETIME = 21600


class NotWatched(Exception):
    """There is nothing to watch here; the message says why."""


class Source(Protocol):
    """One platform. `interval` is the pause between two questions in seconds."""

    name: str
    interval: float

    async def ask(self) -> Notice | None: ...


class Aws:
    """The instance metadata service of AWS, version 2: spot interruptions and rebalance."""

    name, interval = "AWS", 5.0

    def __init__(self, url: str = AWS_URL) -> None:
        self._url = url
        self._token = ""
        self._is_spot = False

    async def ask(self) -> Notice | None:
        if not self._is_spot:
            life_cycle = await self._get("instance-life-cycle")
            if life_cycle is not None and life_cycle.strip() != b"spot":
                raise NotWatched("this instance is not a spot instance")
            self._is_spot = True
        if (body := await self._get("spot/instance-action")) is not None:
            return notices.aws_spot_action(body, _now())
        if (body := await self._get("events/recommendations/rebalance")) is not None:
            return notices.aws_rebalance(body)
        return None

    async def _get(self, path: str) -> bytes | None:
        """The body; None if there is no such page, which means that nothing is planned."""
        for _ in range(2):
            if not self._token:
                self._token = await self._new_token()
            headers = {"X-aws-ec2-metadata-token": self._token}
            url = f"{self._url}/latest/meta-data/{path}"
            status, body = await fetch("GET", url, headers, TIMEOUT)
            if status != 401:
                break
            self._token = ""  # expired
        if status == 404:
            return None
        return _checked(status, body)

    async def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFETIME)}
        url = f"{self._url}/latest/api/token"
        return _checked(*await fetch("PUT", url, headers, TIMEOUT)).decode("ascii")


class Gcp:
    """The metadata server of Google Cloud."""

    name, interval = "Google Cloud", 1.0

    def __init__(self, url: str = GCP_URL) -> None:
        self._url = f"{url}/computeMetadata/v1/instance"

    async def ask(self) -> Notice | None:
        preempted = notices.gcp_preempted(await self._get("preempted"))
        return preempted or notices.gcp_maintenance(await self._get("maintenance-event"))

    async def _get(self, path: str) -> bytes:
        headers = {"Metadata-Flavor": "Google"}
        return _checked(*await fetch("GET", f"{self._url}/{path}", headers, TIMEOUT))


class Azure:
    """The scheduled events of Azure. They are never acknowledged: that would start them."""

    name, interval = "Azure", 1.0

    def __init__(self, url: str = AZURE_URL) -> None:
        self._url = f"{url}/metadata"
        self._machine = ""
        self._timeout = AZURE_FIRST_TIMEOUT

    async def ask(self) -> Notice | None:
        if not self._machine:
            path = "instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = (await self._get(path, TIMEOUT)).decode().strip()
        body = await self._get("scheduledevents?api-version=2020-07-01", self._timeout)
        self._timeout = TIMEOUT
        return notices.azure_events(body, self._machine, _now())

    async def _get(self, path: str, timeout: float) -> bytes:
        return _checked(*await fetch("GET", f"{self._url}/{path}", {"Metadata": "true"}, timeout))


class Kubernetes:
    """This pod, and its node if the service account may read it, at the API server."""

    name, interval = "Kubernetes", 2.0

    def __init__(self, url: str, pod: str, account: Path = SERVICE_ACCOUNT) -> None:
        self._url, self._pod, self._account = f"{url}/api/v1", pod, account
        self._reads_node = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Kubernetes | None:
        """The API server of the cluster that this process runs in; None outside a cluster."""
        host = environ.get("KUBERNETES_SERVICE_HOST", "")
        pod = environ.get("POD_NAME") or environ.get("HOSTNAME", "")
        if not host or not pod or not (SERVICE_ACCOUNT / "token").exists():
            return None
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{environ.get('KUBERNETES_SERVICE_PORT', '443')}", pod)

    async def ask(self) -> Notice | None:
        namespace = (self._account / "namespace").read_text().strip()
        status, body = await self._get(f"namespaces/{namespace}/pods/{self._pod}")
        if status == 403:
            raise NotWatched(
                f"the service account may not get pod {self._pod} in namespace {namespace}: allow "
                "it the verb get on pods, or rely on SIGTERM"
            )
        if status == 404:
            raise NotWatched(
                f"there is no pod {self._pod} in namespace {namespace}: set POD_NAME to the pod's "
                "name, which HOSTNAME is not with hostNetwork, or rely on SIGTERM"
            )
        pod = _checked(status, body)
        if (notice := notices.kubernetes_pod(pod)) is not None:
            return notice
        node, grace = notices.pod_node(pod)
        if not node or not self._reads_node:
            return None
        status, body = await self._get(f"nodes/{node}")
        if status == 403:
            self._reads_node = False
            return None
        return notices.kubernetes_node(_checked(status, body), grace)

    async def _get(self, path: str) -> tuple[int, bytes]:
        # The kubelet replaces the token from time to time.
        headers = {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}"}
        return await fetch("GET", f"{self._url}/{path}", headers, TIMEOUT, self._tls())

    def _tls(self) -> ssl.SSLContext | None:
        if not self._url.startswith("https:"):
            return None
        return ssl.create_default_context(cafile=str(self._account / "ca.crt"))


class NoticeFile:
    """A file that a user or a script of the site creates: `[SECONDS] [REASON]`, or empty."""

    interval = 0.5

    def __init__(self, path: str) -> None:
        self.name = path

    async def ask(self) -> Notice | None:
        try:
            text = Path(self.name).read_text()
        except FileNotFoundError:
            return None
        return notices.notice_file(text, self.name)


#: The sources that can be named with `--preemption`, except `file`, with the usual address.
CLOUDS: Mapping[str, Callable[..., Source]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def _checked(status: int, body: bytes) -> bytes:
    if status != 200:
        raise ValueError(f"HTTP status {status}")
    return body


def _now() -> datetime:
    return datetime.now(timezone.utc)
