"""Settings of the connection to etcd, from `--rdzv-conf` or a rendezvous URL; checked before
use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchelastic import env
from torchelastic.config.values import seconds
from torchelastic.errors import ConfigError

#: All setting names.
KEYS = (
    "etcd_prefix",
    "etcd_outage",
    "etcd_user",
    "etcd_password_file",
    "protocol",
    "cacert",
    "cert",
    "key",
)
USER_VARIABLE = "TORCHELASTIC_ETCD_USER"
PASSWORD_FILE_VARIABLE = "TORCHELASTIC_ETCD_PASSWORD_FILE"

#: The most bytes of a password file.
_PASSWORD_LIMIT = 4096


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. Without `cacert`, the system's CAs are trusted; without `cert`, the client has no
    certificate; without `key`, the key is in `cert`."""

    cacert: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True)
class Login:
    """User and password for etcd."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class EtcdSettings:
    """The key prefix, the login and the connection settings."""

    #: The prefix of all jobs' keys.
    prefix: str = "/torchelastic"
    #: Seconds of an etcd outage that nodes survive: leases last at least this long.
    outage: float = 15.0
    login: Login | None = None
    #: None: no TLS.
    tls: TlsFiles | None = None

    @classmethod
    def of(cls, conf: Mapping[str, Any]) -> EtcdSettings:
        """Read the settings; raise a `ConfigError` for an invalid one.

        >>> EtcdSettings.of({"etcd_prefix": "torchelastic/p2p/", "protocol": "http"})
        EtcdSettings(prefix='/torchelastic/p2p', outage=15.0, login=None, tls=None)
        """
        given = {key: str(conf[key]) for key in KEYS if conf.get(key) not in (None, "")}
        return cls(
            prefix=_prefix(given.get("etcd_prefix", cls.prefix)),
            outage=seconds(given.get("etcd_outage", str(cls.outage)), "etcd_outage"),
            login=_login(given),
            tls=_tls(given),
        )


def _prefix(text: str) -> str:
    if not text.strip("/"):
        raise ConfigError("etcd_prefix must be a key such as /torchelastic.")
    return "/" + text.strip("/")


def _login(given: Mapping[str, str]) -> Login | None:
    user = given.get("etcd_user") or env.get(USER_VARIABLE)
    path = given.get("etcd_password_file") or env.get(PASSWORD_FILE_VARIABLE)
    if not user and not path:
        return None
    if not user or not path:
        raise ConfigError(
            "etcd needs both a user and a password: set both etcd_user and etcd_password_file, "
            "or neither."
        )
    return Login(user, _password(path))


def _password(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            # Only a little more than allowed: the path may be a whole disk by mistake.
            text = file.read(_PASSWORD_LIMIT + 1).strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            f"Cannot read etcd_password_file {path} ({reason}): name a file that contains only "
            "the password."
        ) from None
    if not text or len(text) > _PASSWORD_LIMIT or "\n" in text:
        raise ConfigError(
            f"etcd_password_file {path} is empty: write the password there, on one line."
        )
    return text


def _tls(given: Mapping[str, str]) -> TlsFiles | None:
    """The TLS settings; raise an error for contradictory ones rather than connect without TLS."""
    files = {name: given[name] for name in ("cacert", "cert", "key") if name in given}
    protocol = given.get("protocol", "https" if files else "http")
    if protocol not in ("http", "https"):
        raise ConfigError(f"Unknown protocol '{protocol}': use http or https.")
    if protocol == "http":
        if files:
            raise ConfigError(f"{', '.join(files)} cannot be used with protocol=http: use https.")
        return None
    if "key" in files and "cert" not in files:
        raise ConfigError("key needs its certificate: set cert=FILE as well.")
    return TlsFiles(**files)
