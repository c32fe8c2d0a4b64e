"""TLS, SASL and ACLs of a secured cluster: settings of its servers, and ours to go with them.

Certificates, which openssl makes, and passwords are in the folder ``security`` of the cluster. They
are made again at each start.
"""

import base64
import hashlib
import json
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from daemon.local.ports import LOOPBACK
from daemon.local.spec import ClusterSpec
from ledgers.errors import SettingsError
from ledgers.secret import Secret
from ledgers.security import OPEN, SecuritySettings

FOLDER, SETTINGS_FILE = "security", "bookmender.toml"
USER = "bookkeeper"
"""BookKeeper's default allows only users whose name contains ``bookkeeper``."""
ROLE = "bookmender"
"""The role in the client's certificate, for BookKeeper's BookieAuthZFactory."""
LOGIN = "org.apache.zookeeper.server.auth.DigestLoginModule"
BOOKIE_SASL = {
    "bookieAuthProviderFactoryClass": "org.apache.bookkeeper.sasl.SASLBookieAuthProviderFactory"
}
ZOOKEEPER_SASL = {
    "authProvider.sasl": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"
}
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
DAYS = 365


def settings_file(data: Path, spec: ClusterSpec) -> Path | None:
    """Return our settings for a secured cluster; None for another cluster."""
    return data / FOLDER / SETTINGS_FILE if spec.is_secured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate and its key, as files. ``both``: a file with the two."""

    certificate: Path
    key: Path
    both: Path


class Authority:
    """A CA that issues certificates into its folder."""

    def __init__(self, folder: Path, name: str = "ca", *, is_new: bool = True) -> None:
        """``is_new``: False: its files are in the folder."""
        self._folder = folder
        self.certificate = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        if is_new:
            run_openssl(
                *("req", "-x509", *KEY, "-days", f"{DAYS}", "-subj", f"/CN={name}"),
                *("-keyout", str(self._key), "-out", str(self.certificate)),
            )

    def find(self, name: str) -> Certificate:
        """Return the certificate of this name that was or will be issued."""
        certificate, key, both = (
            self._folder / f"{name}{e}" for e in (".pem", ".key", "-both.pem")
        )
        return Certificate(certificate=certificate, key=key, both=both)

    def issue(
        self, name: str, *, hosts: Sequence[str] = (LOOPBACK,), days: int = DAYS, unit: str = ""
    ) -> Certificate:
        """Issue a certificate for these names and addresses. ``days``: -1: it has expired.
        ``unit``: its OU."""
        issued = self.find(name)
        request, names = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        listed = ",".join(f"{'IP' if host[:1].isdigit() else 'DNS'}:{host}" for host in hosts)
        names.write_text(f"subjectAltName={listed}\n")
        subject = f"/CN={name}" + (f"/OU={unit}" if unit else "")
        run_openssl(
            "req", "-new", *KEY, "-subj", subject, "-keyout", str(issued.key), "-out", str(request)
        )
        run_openssl(
            *("x509", "-req", "-in", str(request), "-out", str(issued.certificate)),
            *("-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial"),
            *("-days", str(days), "-extfile", str(names)),
        )
        issued.both.touch(mode=0o600)
        issued.both.write_bytes(issued.certificate.read_bytes() + issued.key.read_bytes())
        return issued


def find_openssl() -> str:
    """Return the path of openssl. Raise SettingsError with advice if there is none."""
    found = shutil.which("openssl")
    if found is None:
        raise SettingsError("openssl makes the certificates: install it (Debian: openssl)")
    return found


def run_openssl(*arguments: str) -> None:
    subprocess.run([find_openssl(), *arguments], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Certificates and passwords in a folder, for servers and clients."""

    folder: Path
    authority: Authority
    server: Certificate
    client: Certificate
    password: Secret[str]
    password_file: Path

    @classmethod
    def make(
        cls, folder: Path, *, hosts: Sequence[str] | None = None, password: str | None = None
    ) -> "Secrets":
        """Make new secrets. ``hosts``: of the servers; None: loopback. ``password``: None: a random
        one. Raises SettingsError without openssl."""
        folder.mkdir(mode=0o700, exist_ok=True)
        authority = Authority(folder)
        # ZooKeeper's Java client looks up the name of the address, and expects it in the
        # certificate.
        hosts = hosts or sorted({LOOPBACK, socket.getfqdn(LOOPBACK)})
        made = cls(
            folder=folder,
            authority=authority,
            server=authority.issue("server", hosts=hosts),
            client=authority.issue("client", unit=f"0:{ROLE}"),
            password=Secret(secrets.token_urlsafe() if password is None else password),
            password_file=folder / "password",
        )
        made.file(made.password_file.name, f"{made.password.reveal()}\n")
        return made

    @classmethod
    def load(cls, folder: Path) -> "Secrets":
        """Return the secrets that ``make`` left in the folder."""
        authority, password_file = Authority(folder, is_new=False), folder / "password"
        return cls(
            folder=folder,
            authority=authority,
            server=authority.find("server"),
            client=authority.find("client"),
            password=Secret(password_file.read_text().strip()),
            password_file=password_file,
        )

    def secure(self, spec: ClusterSpec) -> ClusterSpec:
        """Return the spec with the settings that secure its servers throughout."""
        assert spec.zookeeper_tls_port is not None
        return replace(
            spec,
            bookie_settings={
                **self.bookie_tls(),
                **BOOKIE_SASL,
                "zkEnableSecurity": "true",
                **spec.bookie_settings,
            },
            bookie_jvm_flags=(*self.jvm_flags("Bookie", "Client"), *spec.bookie_jvm_flags),
            zookeeper_settings={
                # No certificate is asked for, so the owner of our znodes is always that of SASL.
                **self.zookeeper_tls(spec.zookeeper_tls_port, asks=False),
                **ZOOKEEPER_SASL,
                **spec.zookeeper_settings,
            },
            zookeeper_jvm_flags=(*self.zookeeper_jvm_flags, *spec.zookeeper_jvm_flags),
        )

    @property
    def client_settings(self) -> SecuritySettings:
        """Our settings for a cluster that is secured throughout."""
        return SecuritySettings(
            zookeeper_tls=True,
            bookie_tls=True,
            zookeeper_acl="creator",
            **self.trust,
            **self.certificate,
            **self.zookeeper_login,
            **self.bookie_login,
        )

    def write_settings(self, metadata_service_uri: str) -> None:
        """Write a settings file for nodes and commands."""
        settings = asdict(self.client_settings)
        lines = [f"metadata_service_uri = {json.dumps(metadata_service_uri)}", "[security]"]
        lines += [
            f"{key} = {json.dumps(value)}"
            for key, value in settings.items()
            if value != getattr(OPEN, key)
        ]
        self.file(SETTINGS_FILE, "\n".join(lines) + "\n")

    def jvm_flags(self, *sections: str) -> tuple[str, ...]:
        """Flags with a JAAS file of these sections: ``Server`` is ZooKeeper, ``Bookie`` a bookie,
        ``Auditor`` Java's AutoRecovery as a client of bookies, ``Client`` any client of ZooKeeper,
        which then uses TLS.
        """
        password = self.password.reveal()
        user = f'username="{USER}" password="{password}"'
        logins = {
            "Server": f'user_{USER}="{password}"',
            "Client": user,
            "Auditor": user,
            "Bookie": f'user_{USER}="{password}" user_other="{password}"',
        }
        jaas = self.file(
            f"{'-'.join(sections)}.conf",
            "".join(f"{name} {{ {LOGIN} required {logins[name]}; }};\n" for name in sections),
        )
        tls = (
            "-Dzookeeper.client.secure=true",
            "-Dzookeeper.clientCnxnSocket=org.apache.zookeeper.ClientCnxnSocketNetty",
            f"-Dzookeeper.ssl.trustStore.location={self.authority.certificate}",
            "-Dzookeeper.ssl.trustStore.type=PEM",
        )
        return (
            f"-Djava.security.auth.login.config={jaas}",
            "-Dzookeeper.fips-mode=false",  # else Java clients of 3.9 refuse DIGEST-MD5
            *(tls if "Client" in sections else ()),
        )

    @property
    def superuser(self) -> str:
        """ZooKeeper's superuser, for the local cluster's own look at znodes that its bookies
        own."""
        return f"super:{self.password.reveal()}"

    @property
    def zookeeper_jvm_flags(self) -> tuple[str, ...]:
        digest = base64.b64encode(hashlib.sha1(self.superuser.encode()).digest()).decode()
        flag = f"-Dzookeeper.DigestAuthenticationProvider.superDigest=super:{digest}"
        return (*self.jvm_flags("Server"), flag)

    def file(self, name: str, text: str) -> Path:
        """Write a file that only its owner may read."""
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    def bookie_tls(self) -> dict[str, str]:
        return {
            "tlsProvider": "JDK",
            "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory",
            "tlsKeyStoreType": "PEM",
            "tlsKeyStore": str(self.server.key),
            "tlsCertificatePath": str(self.server.certificate),
            "tlsTrustStoreType": "PEM",
            "tlsTrustStore": str(self.authority.certificate),
            "tlsClientAuthentication": "true",
        }

    def zookeeper_tls(self, port: int, *, asks: bool = True) -> dict[str, str]:
        return {
            "secureClientPort": str(port),
            "secureClientPortAddress": LOOPBACK,
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.location": str(self.server.both),
            "ssl.keyStore.type": "PEM",
            "ssl.trustStore.location": str(self.authority.certificate),
            "ssl.trustStore.type": "PEM",
            "ssl.clientAuth": "need" if asks else "none",
        }

    @property
    def trust(self) -> dict[str, Any]:
        return {"ca_file": str(self.authority.certificate)}

    @property
    def certificate(self) -> dict[str, Any]:
        return {
            "certificate_file": str(self.client.certificate),
            "key_file": str(self.client.key),
        }

    @property
    def zookeeper_login(self) -> dict[str, Any]:
        return {"zookeeper_user": USER, "zookeeper_password_file": str(self.password_file)}

    @property
    def bookie_login(self) -> dict[str, Any]:
        return {"bookie_user": USER, "bookie_password_file": str(self.password_file)}
