"""Certificates for tests, made with openssl while they run."""

from pathlib import Path

import pytest

from daemon.local.security import find_openssl, run_openssl
from ledgers.errors import SettingsError


def need_openssl() -> None:
    try:
        find_openssl()
    except SettingsError as error:
        pytest.skip(str(error))


def encrypted(key: Path, password: str) -> Path:
    """Return a copy of the key that is encrypted with the password."""
    target = key.with_suffix(".encrypted")
    run_openssl(
        "pkcs8", "-topk8", "-in", str(key), "-out", str(target), "-passout", f"pass:{password}"
    )
    return target
