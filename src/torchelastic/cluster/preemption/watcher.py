"""The preemption watcher: asks the cloud or cluster whether it will take this machine away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from torchelastic.cluster.preemption.notices import Notice
from torchelastic.cluster.preemption.sources import (
    CLOUDS,
    Kubernetes,
    NoticeFile,
    NotWatched,
    Source,
)
from torchelastic.config import parse_preemption
from torchelastic.errors import ConfigError, WireError
from torchelastic.side_tasks import pause

logger = logging.getLogger(__name__)

#: Failures in a row before they are reported.
FAILURES = 3
#: The longest pause after failures: a notice may come only 30 s before the end. A source that has
#: never answered may not exist here, or may still be starting.
LONGEST_PAUSE, UNKNOWN_PAUSE = 5.0, 60.0

#: What the firmware of a machine of each cloud says about it (/sys/class/dmi/id).
_FIRMWARE = {
    "aws": ("sys_vendor", "Amazon EC2"),
    "gcp": ("product_name", "Google Compute Engine"),
    "azure": ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),
}


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
