"""Which connections use TLS and authentication, and the files that hold certificates and passwords.

``SecuritySettings`` are the settings. They hold paths and user names, never a secret, so they can
be shown, logged and sent to the executors of fsck. ``Security`` reads the files, and reads them
again after they changed, so that certificates and passwords can be renewed without a restart. New
connections use the new content; established connections stay as they are.

``tls_failure`` says what a failed TLS handshake means and what to do next. Not here: the handshakes
themselves (``bookie_auth``, ``zookeeper``).
"""

from __future__ import annotations

import functools
import os
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from ledgers.errors import LocalLimitError, SettingsError
from ledgers.secret import Secret
from ledgers.wire.sasl import Credentials

log = structlog.get_logger()

T = TypeVar("T")

ACLS = ("open", "creator")
MECHANISMS = ("DIGEST-MD5", "PLAIN")
SECRET_BYTES_MAX = 4096
"""A password file that is longer is probably another file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    """The section ``[security]``. All files are given by absolute paths; certificates are PEM."""

    zookeeper_tls: bool = False
    """Connect to ZooKeeper with TLS, at its ``secureClientPort``."""
    bookie_tls: bool = False
    """Connect to bookies with TLS (STARTTLS on their usual port)."""
    ca_file: str = ""
    """Certificates of the CAs that are trusted. Empty: those of the operating system."""
    certificate_file: str = ""
    """Our certificate and its chain, for servers that ask for one."""
    key_file: str = ""
    """The private key of the certificate. Empty: it is in ``certificate_file``."""
    key_password_file: str = ""
    """The password of the private key. Empty: the key is not encrypted."""
    verify_host_names: bool = True
    """False: any certificate that a trusted CA signed is accepted, whatever host it names."""
    zookeeper_user: str = ""
    """User for SASL DIGEST-MD5 at ZooKeeper. Empty: no SASL."""
    zookeeper_password_file: str = ""
    """The password of ``zookeeper_user``."""
    zookeeper_acl: str = "open"
    """ACL of the znodes that we create. ``open``: everybody has all permissions. ``creator``: only
    our own identity has, as with BookKeeper's ``zkEnableSecurity=true``."""
    bookie_user: str = ""
    """User for authentication at bookies. Empty: none."""
    bookie_password_file: str = ""
    """The password of ``bookie_user``."""
    bookie_mechanism: str = "DIGEST-MD5"
    """``DIGEST-MD5``, as BookKeeper's SASL plugin, or ``PLAIN``, for an operator's own plugin."""
    bookie_plugin: str = "sasl"
    """The name of the bookies' authentication plugin in BookKeeper's AuthMessage."""

    def __post_init__(self) -> None:
        for key, allowed in (("zookeeper_acl", ACLS), ("bookie_mechanism", MECHANISMS)):
            if (value := getattr(self, key)) not in allowed:
                raise SettingsError.not_allowed(f"security.{key}", value, ", ".join(allowed))
        for key in _FILES:
            if (path := getattr(self, key)) and not Path(path).is_absolute():
                allowed_path = "an absolute path, as in /etc/bookmender/ca.pem"
                raise SettingsError.not_allowed(f"security.{key}", path, allowed_path)
        for key in ("ca_file", "certificate_file"):
            if getattr(self, key) and not (self.zookeeper_tls or self.bookie_tls):
                raise _missing(key, "security.zookeeper_tls or security.bookie_tls")
        for key in ("key_file", "key_password_file"):
            if getattr(self, key) and not self.certificate_file:
                raise _missing(key, "security.certificate_file")
        for server in ("zookeeper", "bookie"):
            keys = (f"{server}_user", f"{server}_password_file")
            for key, other in (keys, keys[::-1]):
                if getattr(self, key) and not getattr(self, other):
                    raise _missing(key, f"security.{other}")
        if self.bookie_user and self.bookie_mechanism == "PLAIN" and not self.bookie_tls:
            raise SettingsError(
                "security.bookie_mechanism is 'PLAIN', which sends the password as it is: "
                "set security.bookie_tls, too",
                setting="security.bookie_mechanism",
            )
        has_identity = self.zookeeper_user or (self.zookeeper_tls and self.certificate_file)
        if self.zookeeper_acl == "creator" and not has_identity:
            raise _missing(
                "zookeeper_acl",
                "security.zookeeper_user, or security.zookeeper_tls with security.certificate_file",
            )


_FILES = (
    "ca_file",
    "certificate_file",
    "key_file",
    "key_password_file",
    "zookeeper_password_file",
    "bookie_password_file",
)
OPEN = SecuritySettings()
"""No TLS, no authentication, open ACLs."""


def _missing(key: str, others: str) -> SettingsError:
    return SettingsError(
        f"security.{key} has no effect alone: set {others}, too", setting=f"security.{key}"
    )


@functools.cache
def security_for(settings: SecuritySettings) -> Security:
    """Return the Security of these settings, which all connections of the process share."""
    return Security(settings)


class Security:
    """The present content of the files. May be used by any thread. All methods may block on a disk.
    The methods raise SettingsError if a file is unusable and no earlier content is known."""

    def __init__(self, settings: SecuritySettings) -> None:
        self.settings = settings
        files = (settings.ca_file, settings.certificate_file)
        keys = (settings.key_file, settings.key_password_file)
        self._tls = FromFiles("tls", [*files, *keys], lambda: _client_context(settings))
        self._zookeeper = FromFiles(
            "zookeeper_password",
            [settings.zookeeper_password_file],
            lambda: _credentials("zookeeper", settings),
        )
        self._bookie = FromFiles(
            "bookie_password",
            [settings.bookie_password_file],
            lambda: _credentials("bookie", settings),
        )

    def check(self) -> None:
        """Read all files that the settings name. Raises SettingsError."""
        self.zookeeper_tls()
        self.bookie_tls()
        self.zookeeper_credentials()
        self.bookie_credentials()

    def zookeeper_tls(self) -> ssl.SSLContext | None:
        """Return the context for ZooKeeper; None: without TLS."""
        return self._tls.get() if self.settings.zookeeper_tls else None

    def bookie_tls(self) -> ssl.SSLContext | None:
        """Return the context for bookies; None: without TLS."""
        return self._tls.get() if self.settings.bookie_tls else None

    def zookeeper_credentials(self) -> Credentials | None:
        """Return the user and the password for ZooKeeper; None: without authentication."""
        return self._zookeeper.get() if self.settings.zookeeper_user else None

    def bookie_credentials(self) -> Credentials | None:
        """Return the user and the password for bookies; None: without authentication."""
        return self._bookie.get() if self.settings.bookie_user else None


class FromFiles(Generic[T]):
    """A value that is made from files, and again after one of them changed. If that fails, the
    former value stays: a certificate is often replaced before its key. The next call tries
    again."""

    def __init__(self, what: str, paths: Sequence[str], make: Callable[[], T]) -> None:
        self._what, self._make = what, make
        self._paths = [path for path in paths if path]
        self._lock = threading.Lock()  # guards the fields below
        self._value: T | None = None
        self._stamp: object = None
        self._failed_stamp: object = None

    def get(self) -> T:
        with self._lock:
            # Before the files are read: a change while they are read is found by the next call.
            stamp = [_stamp(path) for path in self._paths]
            if self._value is not None and stamp == self._stamp:
                return self._value
            try:
                value = self._make()
            except (SettingsError, LocalLimitError) as error:
                if self._value is None:
                    raise
                if stamp != self._failed_stamp:
                    log.warning("security.reload_failed", what=self._what, error=str(error))
                self._failed_stamp = stamp
                return self._value
            if self._value is not None:
                log.info("security.reloaded", what=self._what)
            self._value, self._stamp = value, stamp
            return value


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Return what differs between versions of a file; None if it is not there."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


# --- The files -----------------------------------------------------------------------------------


def _client_context(settings: SecuritySettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which requires and verifies certificates
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = settings.verify_host_names
    if settings.ca_file:
        load_authorities(context, "security.ca_file", settings.ca_file)
    else:
        context.load_default_certs()
    if settings.certificate_file:
        load_certificate(
            context,
            settings.certificate_file,
            settings.key_file,
            password_file=settings.key_password_file,
            section="security",
        )
    return context


def load_authorities(context: ssl.SSLContext, setting: str, path: str) -> None:
    """Trust the certificates in a file. Raises SettingsError."""
    _read(setting, path)
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        wrong = _unusable(setting, path, "holds no PEM certificate")
        raise LocalLimitError.of(error) or wrong from error


def load_certificate(
    context: ssl.SSLContext,
    certificate_file: str,
    key_file: str,
    *,
    password_file: str = "",
    section: str,
) -> None:
    """Load a certificate and its key, of the settings in ``section``. Raises SettingsError."""
    certificate_setting = f"{section}.certificate_file"
    key_setting = f"{section}.key_file" if key_file else certificate_setting
    key_file = key_file or certificate_file
    is_certificate = b"-----BEGIN CERTIFICATE-----" in _read(certificate_setting, certificate_file)
    if not is_certificate:
        raise _unusable(certificate_setting, certificate_file, "holds no PEM certificate")
    if b"PRIVATE KEY-----" not in _read(key_setting, key_file):
        raise _unusable(key_setting, key_file, "holds no PEM private key")
    password = Secret("")
    if password_file:
        password = _read_secret(f"{section}.key_password_file", password_file)
    try:
        # With an empty password for an encrypted key OpenSSL fails; without one it would ask on the
        # terminal.
        context.load_cert_chain(certificate_file, key_file, password=password.reveal)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            fault = f"is not the key of the certificate in {certificate_setting}"
        elif b"ENCRYPTED" in _read(key_setting, key_file):
            is_named = "check security.key_password_file"
            fault = f"cannot be decrypted: {is_named if section == 'security' else 'decrypt it'}"
        else:
            fault = f"cannot be used ({error.reason})"
        raise _unusable(key_setting, key_file, fault) from error
    except (OSError, ValueError) as error:
        wrong = _unusable(key_setting, key_file, "cannot be used")
        raise LocalLimitError.of(error) or wrong from error


def _credentials(server: str, settings: SecuritySettings) -> Credentials:
    setting = f"{server}_password_file"
    return Credentials(
        user=getattr(settings, f"{server}_user"),
        password=_read_secret(f"security.{setting}", getattr(settings, setting)),
    )


def _read_secret(setting: str, path: str) -> Secret[str]:
    """Return the secret in a file, without the end of its line. Raises SettingsError."""
    content = _read(setting, path)
    if len(content) > SECRET_BYTES_MAX:
        raise _unusable(setting, path, f"holds more than {SECRET_BYTES_MAX} bytes")
    try:
        secret = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        secret = ""
    if not secret or "\n" in secret or "\0" in secret:
        # The cause is left out: a UnicodeDecodeError would show the content.
        raise _unusable(setting, path, "does not hold one line of UTF-8 text, the password")
    return Secret(secret)


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        if (failure := LocalLimitError.of(error)) is not None:
            raise failure from error
        reason = (error.strerror or "unreadable").lower()
        hint = ". Grant the service user read access" if isinstance(error, PermissionError) else ""
        raise SettingsError(
            f"{setting}: cannot read {path}: {reason}{hint}", setting=setting
        ) from error


def _unusable(setting: str, path: str, fault: str) -> SettingsError:
    return SettingsError(f"{setting}: {path} {fault}", setting=setting)


# --- Failed handshakes ---------------------------------------------------------------------------

_UNTRUSTED = {2, 18, 19, 20, 21}
_WRONG_HOST = {62, 64}
"""Codes of OpenSSL's verification (X509_V_ERR_...)."""


def tls_failure(
    error: BaseException,
    settings: SecuritySettings,
    *,
    server: str,
    host: str,
    is_established: bool = False,
) -> str:
    """Return what a failed TLS connection means and what to do next.

    ``server``: ``the bookie`` or ``ZooKeeper``; ``host``: the name that its certificate must have.
    ``is_established``: True if the connection broke after our side of the handshake. In TLS 1.3 the
    server verifies our certificate only then, and its reason may be lost with the connection.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {server} {_certificate_fault(error, settings, host)}"
    reason = (getattr(error, "reason", None) or "") if isinstance(error, ssl.SSLError) else ""
    if "ALERT" in reason:
        alert = reason.lower().replace("_", " ")
        return f"{server} ended the TLS handshake ({alert}): {_check_ours(settings)}"
    if is_established:
        return f"{server} closed the connection after the TLS handshake: {_check_ours(settings)}"
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        fault = "does not answer with TLS at this port"
    elif isinstance(error, TimeoutError | ConnectionAbortedError):
        fault = "did not finish the TLS handshake in time (it may be overloaded)"
    elif isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return f"the TLS handshake with {server} failed ({reason.lower().replace('_', ' ')})"
    else:
        fault = "closed the connection during the TLS handshake"
    return (
        f"{server} {fault}: check that TLS is on at this port (secureClientPort of ZooKeeper, "
        f"tlsProvider of a bookie); else {_check_ours(settings)}"
    )


def _check_ours(settings: SecuritySettings) -> str:
    if settings.certificate_file:
        return (
            "check that the certificate in security.certificate_file "
            f"({settings.certificate_file}) is valid and signed by a CA that the server trusts"
        )
    return "set security.certificate_file and security.key_file if it asks for a certificate"


def _certificate_fault(
    error: ssl.SSLCertVerificationError, settings: SecuritySettings, host: str
) -> str:
    match error.verify_code:
        case 10:  # X509_V_ERR_CERT_HAS_EXPIRED
            return "has expired: renew it on the server"
        case 9:  # X509_V_ERR_CERT_NOT_YET_VALID
            return "is not valid yet: check the clocks of both hosts"
        case code if code in _UNTRUSTED:
            trusted = f"security.ca_file ({settings.ca_file})" if settings.ca_file else "the system"
            return f"is not signed by a CA of {trusted}: add its CA there (security.ca_file)"
        case code if code in _WRONG_HOST:
            fix = "issue one that does, or set security.verify_host_names = false"
            return f"does not name {host}: {fix}"
    return f"was refused ({error.verify_message})"
