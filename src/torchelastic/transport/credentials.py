"""Load the job's secret and the certificates of this node; the TLS contexts made of them."""

from __future__ import annotations

import logging
import os
import stat
from typing import TYPE_CHECKING

from torchelastic import env
from torchelastic.config import ETCD_BACKENDS, LaunchConfig, parse_endpoints
from torchelastic.errors import ConfigError
from torchelastic.transport.addresses import loopback_addresses
from torchelastic.transport.auth import LONGEST, Credentials, Secret

if TYPE_CHECKING:
    import ssl

log = logging.getLogger(__name__)

VARIABLE = "TORCHELASTIC_SECRET"


def load(config: LaunchConfig) -> Credentials:
    """Load the credentials of this node, and warn about weaknesses."""
    shown = load_quietly(config)
    for doubt in doubts(config, shown.secret):
        log.warning("%s", doubt)
    return shown


def load_quietly(config: LaunchConfig) -> Credentials:
    """Load the credentials of this node without warnings."""
    secret = load_secret(config)
    if not config.rdzv_tls_cert:
        return Credentials(secret)
    return Credentials(secret, _tls(config, server=True), _tls(config, server=False))


def doubts(config: LaunchConfig, secret: Secret | None) -> list[str]:
    """Warnings about a job's secret, a sentence each."""
    path = config.rdzv_secret_file
    if path and os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH):
        return [
            f"Every user of this machine can read or write the secret file: run chmod 600 {path}."
        ]
    if secret is None and _is_open(config):
        return [
            f"This job has no secret: anyone who can reach {_danger(config)}. Give every node "
            f"the same --rdzv-secret-file or {VARIABLE}."
        ]
    return []


def load_secret(config: LaunchConfig) -> Secret | None:
    """The job's secret: from the file if one is named, else from the environment; None if it has
    none."""
    if config.rdzv_secret_file:
        return read_secret(config.rdzv_secret_file, "--rdzv-secret-file")
    text = env.get(VARIABLE)
    if not text:
        return None
    try:
        return Secret(os.fsencode(text))
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from None


def read_secret(path: str, flag: str) -> Secret:
    """The secret in a file that a flag names."""
    try:
        with open(path, "rb") as file:
            # A little more than allowed: a whole disk named by mistake is not read.
            return Secret(file.read(2 * LONGEST))
    except OSError as error:
        raise ConfigError(
            f"Cannot read {flag} {path} ({error.strerror}): name a file that contains the secret."
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{flag} {path}: {error}") from None


def _is_open(config: LaunchConfig) -> bool:
    """Return whether other machines can reach a port of ours: nodes with etcd listen too, for each
    other."""
    if not config.rdzv_endpoint:
        return False
    return not all(loopback_addresses(host) for host, _ in parse_endpoints(config.rdzv_endpoint))


def _danger(config: LaunchConfig) -> str:
    if config.rdzv_backend in ETCD_BACKENDS:
        return "its agents can impersonate one of them"
    return f"{config.rdzv_endpoint} can join it and stop it"


def _tls(config: LaunchConfig, *, server: bool) -> ssl.SSLContext:
    """Mutual TLS: both ends need a certificate from the CA, and nothing else is checked.

    Host names are not checked: nodes use addresses that no certificate foresees.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    flag, path = "", ""
    try:
        flag, path = "--rdzv-tls-ca", str(config.rdzv_tls_ca)
        context.load_verify_locations(path)
        flag, path = "--rdzv-tls-cert", f"{config.rdzv_tls_cert} (with {config.rdzv_tls_key})"
        # Without a password to give, an encrypted key would be asked for at the terminal.
        context.load_cert_chain(str(config.rdzv_tls_cert), config.rdzv_tls_key, password="")
    except (OSError, ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"Cannot use {flag} {path} ({reason}): name PEM files, with an unencrypted key."
        ) from None
    return context
