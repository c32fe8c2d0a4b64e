"""Certificates, passwords and settings of a secured local cluster."""

from pathlib import Path

from daemon.local.security import FOLDER, Secrets, settings_file
from daemon.local.spec import settle
from daemon.local.status import status_of
from daemon.settings import load_settings
from tests.certificates import need_openssl

SPEC = settle(None, bookie_count=1, asked={}, is_secured=True)


def made(data: Path) -> Secrets:
    need_openssl()
    return Secrets.make(data / FOLDER)


def test_the_settings_file_has_what_clients_need(tmp_path: Path) -> None:
    secrets = made(tmp_path)

    secrets.write_settings(SPEC.metadata_service_uri)

    file = settings_file(tmp_path, SPEC)
    assert file is not None
    assert str(file) == status_of(SPEC, tmp_path).settings_file
    settings = load_settings(file, environment={})
    assert settings.metadata_service_uri == SPEC.metadata_service_uri
    assert settings.security == secrets.client_settings
    assert secrets.password.reveal() not in file.read_text()


def test_others_cannot_read_secrets(tmp_path: Path) -> None:
    secrets = made(tmp_path)
    secrets.secure(SPEC)
    secrets.write_settings(SPEC.metadata_service_uri)

    parts = (secrets.password.reveal(), "PRIVATE KEY")
    files = [f for f in secrets.folder.iterdir() if any(part in f.read_text() for part in parts)]
    assert len(files) >= 8, files
    assert {path.name: oct(path.stat().st_mode & 0o077) for path in files} == dict.fromkeys(
        (path.name for path in files), "0o0"
    )
    assert secrets.folder.stat().st_mode & 0o077 == 0


def test_secrets_are_made_again_at_each_start(tmp_path: Path) -> None:
    first, second = made(tmp_path), made(tmp_path)

    assert first.password != second.password
    assert second.password_file.read_text() == f"{second.password.reveal()}\n"


def test_settings_of_the_user_win(tmp_path: Path) -> None:
    spec = settle(SPEC, bookie_count=None, asked={"bookie_settings": {"tlsProvider": "OpenSSL"}})

    secured = made(tmp_path).secure(spec)

    assert secured.bookie_settings["tlsProvider"] == "OpenSSL"
    assert secured.bookie_settings["zkEnableSecurity"] == "true"
    assert secured.zookeeper_settings["secureClientPort"] == str(SPEC.zookeeper_tls_port)


def test_an_unsecured_cluster_has_no_settings_file(tmp_path: Path) -> None:
    assert settings_file(tmp_path, settle(None, bookie_count=1, asked={})) is None
