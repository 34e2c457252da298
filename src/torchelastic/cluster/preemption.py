"""Notices that this machine or pod will be taken away: how to ask each platform, and when.

For each platform: what it answers, and a source that asks. A function that reads an answer is pure:
it returns a `Notice`, or None if nothing is planned, and raises `ValueError` if the answer is not
what the platform documents.

The time of a notice is computed with this machine's wall clock, which may be wrong. It is therefore
never longer than the platform promises, and never shorter than `SHORTEST`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

from torchelastic.config import parse_preemption
from torchelastic.errors import ConfigError, WireError
from torchelastic.side_tasks import pause
from torchelastic.transport.http_client import fetch

logger = logging.getLogger(__name__)

#: Seconds for an answer. Azure's first one starts a service and may take minutes.
TIMEOUT, AZURE_FIRST_TIMEOUT = 2.0, 150.0
#: The shortest notice assumed, whatever a platform's clock says; the agent itself needs 2 s of it.
SHORTEST = 5.0


@dataclass(frozen=True)
class Notice:
    """This machine or pod will be taken away, or may be."""

    reason: str
    #: Seconds until then; None if unknown.
    seconds: float | None = None
    #: False: only a warning; the node stays.
    leave: bool = True


class NotWatched(Exception):
    """There is nothing to watch here; the message says why."""


class Source(Protocol):
    """One platform. `interval` is the pause between two questions in seconds.

    `ask` raises `OSError`, `WireError` or `ValueError` if the platform did not answer or answered
    something else, and `NotWatched` if asking again is pointless.
    """

    name: str
    interval: float

    async def ask(self) -> Notice | None: ...


# --- AWS ------------------------------------------------------------------------------------------

AWS_URL = "http://169.254.169.254"
#: Seconds promised between a notice and the end.
AWS_NOTICE = 120.0
#: Seconds that a token is valid for; it is renewed when it is rejected.
TOKEN_LIFETIME = 21600


def aws_spot_action(body: bytes, now: datetime) -> Notice | None:
    """`/latest/meta-data/spot/instance-action`."""
    answer = _object(body)
    action, time = _text(answer, "action"), _text(answer, "time")
    seconds = _until(datetime.fromisoformat(time.replace("Z", "+00:00")), now, AWS_NOTICE)
    return Notice(f"AWS will {action} this spot instance at {time}", seconds)


def aws_rebalance(body: bytes) -> Notice | None:
    """`/latest/meta-data/events/recommendations/rebalance`: a risk, without a time."""
    time = _text(_object(body), "noticeTime")
    return Notice(f"AWS recommended to replace this spot instance at {time}", leave=False)


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
            return aws_spot_action(body, _now())
        if (body := await self._get("events/recommendations/rebalance")) is not None:
            return aws_rebalance(body)
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


# --- Google Cloud ---------------------------------------------------------------------------------

GCP_URL = "http://metadata.google.internal"
#: Seconds promised between a notice and the end.
GCP_NOTICE, GCP_MAINTENANCE_NOTICE = 30.0, 60.0


def gcp_preempted(body: bytes) -> Notice | None:
    """`/computeMetadata/v1/instance/preempted`."""
    match body.strip():
        case b"TRUE":
            return Notice("Google Cloud preempts this instance", GCP_NOTICE)
        case b"FALSE":
            return None
    raise ValueError(f"expected TRUE or FALSE, not {_start(body)}")


def gcp_maintenance(body: bytes) -> Notice | None:
    """`/computeMetadata/v1/instance/maintenance-event`. A migration is not an end."""
    if body.strip() == b"TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("Google Cloud stops this instance for maintenance", GCP_MAINTENANCE_NOTICE)
    return None


class Gcp:
    """The metadata server of Google Cloud."""

    name, interval = "Google Cloud", 1.0

    def __init__(self, url: str = GCP_URL) -> None:
        self._url = f"{url}/computeMetadata/v1/instance"

    async def ask(self) -> Notice | None:
        preempted = gcp_preempted(await self._get("preempted"))
        return preempted or gcp_maintenance(await self._get("maintenance-event"))

    async def _get(self, path: str) -> bytes:
        headers = {"Metadata-Flavor": "Google"}
        return _checked(*await fetch("GET", f"{self._url}/{path}", headers, TIMEOUT))


# --- Azure ----------------------------------------------------------------------------------------

AZURE_URL = "http://169.254.169.254"
#: Seconds promised between a notice and the end.
AZURE_NOTICES = {"Preempt": 30.0, "Terminate": 300.0, "Redeploy": 600.0, "Reboot": 900.0}


def azure_events(body: bytes, machine: str, now: datetime) -> Notice | None:
    """`/metadata/scheduledevents`: the first event that ends this machine."""
    answer = _object(body)
    if "Events" not in answer:
        raise ValueError("Events is missing")
    for event in _objects(answer, "Events"):
        kind, start = _text(event, "EventType"), event.get("NotBefore") or ""
        if kind not in AZURE_NOTICES or machine not in _list(event, "Resources"):
            continue
        if not isinstance(start, str):
            raise ValueError("NotBefore is not a time")
        longest = AZURE_NOTICES[kind]
        seconds = _until(parsedate_to_datetime(start), now, longest) if start else SHORTEST
        return Notice(f"Azure: {kind} of {machine}", seconds)
    return None


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
        return azure_events(body, self._machine, _now())

    async def _get(self, path: str, timeout: float) -> bytes:
        return _checked(*await fetch("GET", f"{self._url}/{path}", {"Metadata": "true"}, timeout))


# --- Kubernetes -----------------------------------------------------------------------------------

#: Where Kubernetes puts a pod's credentials.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Taints that announce the end of a node.
_TAINTS = frozenset(
    {
        "node.kubernetes.io/out-of-service",
        "node.cloudprovider.kubernetes.io/shutdown",
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "cloud.google.com/impending-node-termination",
    }
)


def kubernetes_pod(body: bytes) -> Notice | None:
    """The pod as the API server has it: its deletion, or the condition `DisruptionTarget`."""
    pod = _object(body)
    metadata, usual = (
        _part(pod, "metadata"),
        _part(pod, "spec").get("terminationGracePeriodSeconds"),
    )
    # An eviction may set another one.
    grace = _seconds(metadata.get("deletionGracePeriodSeconds", usual))
    for condition in _objects(_part(pod, "status"), "conditions"):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = condition.get("reason") or "DisruptionTarget"
            return Notice(f"Kubernetes disrupts this pod ({reason})", grace)
    if metadata.get("deletionTimestamp"):
        return Notice("Kubernetes deletes this pod", grace)
    return None


def kubernetes_node(body: bytes, grace: float | None) -> Notice | None:
    """The node of the pod: a taint that announces its end."""
    for taint in _objects(_part(_object(body), "spec"), "taints"):
        if taint.get("key") in _TAINTS:
            return Notice(f"Kubernetes removes this node (taint {taint['key']})", grace)
    return None


def pod_node(body: bytes) -> tuple[str, float | None]:
    """The name of a pod's node, empty before it is scheduled, and the pod's grace period."""
    spec = _part(_object(body), "spec")
    return str(spec.get("nodeName", "")), _seconds(spec.get("terminationGracePeriodSeconds"))


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
        if (notice := kubernetes_pod(pod)) is not None:
            return notice
        node, grace = pod_node(pod)
        if not node or not self._reads_node:
            return None
        status, body = await self._get(f"nodes/{node}")
        if status == 403:
            self._reads_node = False
            return None
        return kubernetes_node(_checked(status, body), grace)

    async def _get(self, path: str) -> tuple[int, bytes]:
        # The kubelet replaces the token from time to time.
        headers = {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}"}
        return await fetch("GET", f"{self._url}/{path}", headers, TIMEOUT, self._tls())

    def _tls(self) -> ssl.SSLContext | None:
        if not self._url.startswith("https:"):
            return None
        return ssl.create_default_context(cafile=str(self._account / "ca.crt"))


# --- a file ---------------------------------------------------------------------------------------


def notice_file(text: str, path: str) -> Notice:
    """A file whose existence is the notice: `[SECONDS] [REASON]`, or empty."""
    first, _, rest = text.strip().partition(" ")
    try:
        seconds, reason = float(first), rest.strip()
    except ValueError:
        seconds, reason = float("nan"), text.strip()
    if not 0 <= seconds < float("inf"):  # whatever it says, its existence is the notice
        return Notice(reason or f"{path} exists")
    return Notice(reason or f"{path} exists", max(seconds, SHORTEST))


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
        return notice_file(text, self.name)


# --- reading answers ------------------------------------------------------------------------------


def _until(time: datetime, now: datetime, longest: float) -> float:
    """Return the seconds until a time, which is UTC if it names no zone."""
    time = time if time.tzinfo else time.replace(tzinfo=timezone.utc)
    return min(max((time - now).total_seconds(), SHORTEST), longest)


def _object(body: bytes) -> Mapping[str, Any]:
    answer = json.loads(body)
    if not isinstance(answer, dict):
        raise ValueError(f"expected an object, not {_start(body)}")
    return answer


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name) or {}
    if not isinstance(part, dict):
        raise ValueError(f"{name} is not an object")
    return part


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    part = data.get(name) or []
    if not isinstance(part, list):
        raise ValueError(f"{name} is not a list")
    return part


def _objects(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = _list(data, name)
    if not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{name} is not a list of objects")
    return found


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is missing")
    return value


def _seconds(value: Any) -> float | None:
    return max(float(value), SHORTEST) if isinstance(value, int) else None


def _start(body: bytes) -> str:
    return repr(body[:40].decode("ascii", "replace"))


def _checked(status: int, body: bytes) -> bytes:
    if status != 200:
        raise ValueError(f"HTTP status {status}")
    return body


def _now() -> datetime:
    return datetime.now(timezone.utc)


# --- choosing and asking --------------------------------------------------------------------------

#: The sources that can be named with `--preemption`, except `file`, with the usual address.
CLOUDS: Mapping[str, Callable[..., Source]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
#: What the firmware of a machine of each cloud says about it (/sys/class/dmi/id).
_FIRMWARE = {
    "aws": ("sys_vendor", "Amazon EC2"),
    "gcp": ("product_name", "Google Compute Engine"),
    "azure": ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),
}
#: Failures in a row before they are reported.
FAILURES = 3
#: The longest pause after failures: a notice may come only 30 s before the end. A source that has
#: never answered may not exist here, or may still be starting.
LONGEST_PAUSE, UNKNOWN_PAUSE = 5.0, 60.0


def choose(
    text: str, environ: Mapping[str, str], firmware: Path = Path("/sys/class/dmi/id")
) -> list[Source]:
    """Return the sources that `--preemption` names. `auto` looks at the firmware, not the network.

    Raises `ConfigError` if this is not a pod and `kubernetes` is asked for.
    """
    named = parse_preemption(text)
    return [one for kind, where in named for one in _sources(kind, where, environ, firmware)]


def _sources(kind: str, where: str, environ: Mapping[str, str], firmware: Path) -> list[Source]:
    if kind == "none":
        return []
    if kind == "file":
        return [NoticeFile(where)]
    if kind in CLOUDS:
        return [CLOUDS[kind](where) if where else CLOUDS[kind]()]
    pod = Kubernetes.from_environment(environ)
    if kind == "kubernetes":
        if where:
            return [Kubernetes(where, environ.get("POD_NAME") or environ.get("HOSTNAME", ""))]
        if pod is None:
            raise ConfigError(
                "--preemption kubernetes needs a pod with a service account token: run in a pod, "
                "or remove the flag."
            )
        return [pod]
    clouds = [make() for cloud, make in CLOUDS.items() if _is_machine_of(cloud, firmware)]
    return [*([pod] if pod is not None else []), *clouds]


def _is_machine_of(cloud: str, firmware: Path) -> bool:
    name, wanted = _FIRMWARE[cloud]
    try:
        return (firmware / name).read_text().strip() == wanted
    except OSError:
        return False


async def watch(
    source: Source,
    *,
    notify: Callable[[Notice], None],
    say: Callable[[str], None],
) -> None:
    """Ask until a notice to leave comes and `notify` it; `say` warnings and failures, each once."""
    failures, answered, said = 0, False, set[str]()

    def say_once(sentence: str) -> None:
        if sentence not in said:
            said.add(sentence)
            say(sentence)

    while True:
        try:
            notice = await source.ask()
        except NotWatched as reason:
            say_once(f"No preemption notices from {source.name}: {reason}.")
            return
        except (OSError, WireError, ValueError) as error:
            failures += 1
            logger.debug("%s: %s", source.name, error)
            if failures == FAILURES:
                say_once(
                    f"Cannot read preemption notices from {source.name}: {error}. Trying again."
                )
            longest = LONGEST_PAUSE if answered else UNKNOWN_PAUSE
            await asyncio.sleep(max(source.interval, min(pause(failures), longest)))
            continue
        failures, answered = 0, True
        if notice is not None and notice.leave:
            notify(notice)
            return
        if notice is not None:
            say_once(f"{notice.reason}. This node stays until it is told to go.")
        await asyncio.sleep(source.interval)
