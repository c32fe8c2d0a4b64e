"""Certificates of a local cluster, made with openssl."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.local.ports import LOOPBACK
from ledgers.errors import SettingsError

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
DAYS = 365


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate and its key, as files. ``both``: a file with the two."""

    certificate: Path
    key: Path
    both: Path


class Authority:
    """A CA that issues certificates into its folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self.certificate = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        run_openssl(
            *("req", "-x509", *KEY, "-days", f"{DAYS}", "-subj", f"/CN={name}"),
            *("-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def issue(
        self, name: str, *, hosts: Sequence[str] = (LOOPBACK,), days: int = DAYS, unit: str = ""
    ) -> Certificate:
        """Issue a certificate for these names and addresses. ``days``: -1: it has expired.
        ``unit``: its OU."""
        key, request = self._folder / f"{name}.key", self._folder / f"{name}.csr"
        certificate, both = self._folder / f"{name}.pem", self._folder / f"{name}-both.pem"
        names = self._folder / f"{name}.ext"
        kinds = ("IP" if host[:1].isdigit() else "DNS" for host in hosts)
        listed = ",".join(f"{kind}:{host}" for kind, host in zip(kinds, hosts, strict=True))
        names.write_text(f"subjectAltName={listed}\n")
        subject = f"/CN={name}" + (f"/OU={unit}" if unit else "")
        run_openssl(
            "req", "-new", *KEY, "-subj", subject, "-keyout", str(key), "-out", str(request)
        )
        run_openssl(
            *("x509", "-req", "-in", str(request), "-out", str(certificate)),
            *("-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial"),
            *("-days", str(days), "-extfile", str(names)),
        )
        both.touch(mode=0o600)
        both.write_bytes(certificate.read_bytes() + key.read_bytes())
        return Certificate(certificate=certificate, key=key, both=both)


def find_openssl() -> str:
    """Return the path of openssl. Raise SettingsError with advice if there is none."""
    found = shutil.which("openssl")
    if found is None:
        raise SettingsError("openssl makes the certificates: install it (Debian: openssl)")
    return found


def run_openssl(*arguments: str) -> None:
    subprocess.run([find_openssl(), *arguments], check=True, capture_output=True, timeout=30)
