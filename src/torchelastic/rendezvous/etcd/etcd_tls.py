"""TLS to etcd, from the files in the settings."""

from __future__ import annotations

import ssl

from torchelastic.errors import ConfigError
from torchelastic.rendezvous.etcd.settings import TlsFiles


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """The TLS context for connections to etcd; etcd's host name is checked against its certificate.

    Raises `ConfigError` for unusable files.
    """
    names = ""
    try:
        names = f"cacert={files.cacert}"
        context = ssl.create_default_context(cafile=files.cacert or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if files.cert:
            names = f"cert={files.cert}" + (f", key={files.key}" if files.key else "")
            # With no password callback, OpenSSL would ask for an encrypted key's password at the
            # terminal.
            context.load_cert_chain(files.cert, files.key or None, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"Cannot use {names} for TLS to etcd ({reason}): name PEM files, with an unencrypted "
            "key."
        ) from None
    return context


def words(error: ssl.SSLError) -> str:
    """Describe a TLS error for users."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return (error.reason or str(error)).replace("_", " ").lower()
