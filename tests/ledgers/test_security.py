"""The settings of security, and the files that they name."""

import os
import ssl
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from daemon.local.security import Authority
from ledgers.errors import SettingsError
from ledgers.security import Security, SecuritySettings, tls_failure
from tests.certificates import encrypted, need_openssl

FILE = "/etc/bookmender/file"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        pytest.param({"zookeeper_acl": "world"}, "allowed: open, creator", id="unknown ACL"),
        pytest.param(
            {"bookie_mechanism": "GSSAPI"}, "allowed: DIGEST-MD5, PLAIN", id="unknown mechanism"
        ),
        pytest.param(
            {"ca_file": "ca.pem", "bookie_tls": True}, "an absolute path", id="relative path"
        ),
        pytest.param({"ca_file": FILE}, "set security.zookeeper_tls or", id="CA without TLS"),
        pytest.param(
            {"certificate_file": FILE}, "security.bookie_tls, too", id="certificate without TLS"
        ),
        pytest.param(
            {"key_file": FILE, "bookie_tls": True}, "set security.certificate_file", id="only a key"
        ),
        pytest.param(
            {"bookie_user": "a"}, "set security.bookie_password_file", id="user without password"
        ),
        pytest.param(
            {"zookeeper_password_file": FILE},
            "set security.zookeeper_user",
            id="password without user",
        ),
        pytest.param(
            {"zookeeper_acl": "creator"}, "set security.zookeeper_user, or", id="nobody as creator"
        ),
        pytest.param(
            {"bookie_mechanism": "PLAIN", "bookie_user": "a", "bookie_password_file": FILE},
            "set security.bookie_tls, too",
            id="password in clear text",
        ),
    ],
)
def test_settings_that_do_not_fit_say_what_to_set(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told) as caught:
        SecuritySettings(**given)

    assert (caught.value.setting or "").removeprefix("security.") in asdict(SecuritySettings())


def test_a_certificate_is_an_identity_too() -> None:
    SecuritySettings(zookeeper_acl="creator", zookeeper_tls=True, certificate_file=FILE)


# --- Files ---------------------------------------------------------------------------------------


def with_password(path: Path) -> Security:
    return Security(SecuritySettings(bookie_user="u", bookie_password_file=str(path)))


@pytest.mark.parametrize(
    ("content", "password"),
    [
        pytest.param(b"secret", "secret", id="no end of line"),
        pytest.param(b"secret\n", "secret", id="end of line"),
        pytest.param(b"secret\r\n", "secret", id="end of line of Windows"),
        pytest.param(b" a b \n", " a b ", id="spaces belong to it"),
        pytest.param("ü€\n".encode(), "ü€", id="UTF-8"),
    ],
)
def test_a_password_is_the_line_of_its_file(tmp_path: Path, content: bytes, password: str) -> None:
    path = tmp_path / "password"
    path.write_bytes(content)

    credentials = with_password(path).bookie_credentials()

    assert credentials is not None
    assert credentials.password.reveal() == password


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(None, "cannot read .*: no such file", id="missing"),
        pytest.param(b"", "does not hold one line", id="empty"),
        pytest.param(b"\n", "does not hold one line", id="empty line"),
        pytest.param(b"topsecret\nmore\n", "does not hold one line", id="two lines"),
        pytest.param(b"topsecret\xff", "does not hold one line of UTF-8", id="not UTF-8"),
        pytest.param(b"topsecret" * 1000, "more than 4096 bytes", id="another file"),
    ],
)
def test_an_unusable_password_file_is_named_and_not_shown(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(SettingsError, match=f"security.bookie_password_file: .*{told}") as caught:
        with_password(path).check()

    assert caught.value.setting == "security.bookie_password_file"
    shown: BaseException | None = caught.value
    while shown is not None:
        assert "topsecret" not in str(shown) + repr(shown)
        shown = shown.__cause__


def test_a_changed_file_is_read_again_and_a_bad_one_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("first")
    security = with_password(path)

    def password() -> str:
        credentials = security.bookie_credentials()
        assert credentials is not None
        return credentials.password.reveal()

    assert password() == "first"
    with capture_logs() as logs:
        path.write_text("")
        assert [password(), password()] == ["first", "first"]
        path.unlink()
        assert password() == "first"
        path.write_text("second")
        assert password() == "second"
    assert [each["event"] for each in logs] == [
        "security.reload_failed",
        "security.reload_failed",
        "security.reloaded",
    ]


def test_a_file_replaced_as_kubernetes_does_is_read_again(tmp_path: Path) -> None:
    """A symbolic link is turned to another folder, whose file has the same time and size."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "password").write_text(name)
        os.utime(tmp_path / name / "password", (1, 1))
    link = tmp_path / "data"
    link.symlink_to("one")
    security = with_password(link / "password")
    security.check()

    link.unlink()
    link.symlink_to("two")

    credentials = security.bookie_credentials()
    assert credentials is not None
    assert credentials.password.reveal() == "two"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    need_openssl()
    return Authority(tmp_path_factory.mktemp("certificates"))


def test_the_context_verifies_servers(authority: Authority) -> None:
    settings = SecuritySettings(bookie_tls=True, ca_file=str(authority.certificate))

    context = Security(settings).bookie_tls()

    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) == 1  # those of the system are not trusted besides
    assert Security(settings).zookeeper_tls() is None


def test_an_encrypted_key_needs_its_password(authority: Authority, tmp_path: Path) -> None:
    ours = authority.issue("ours")
    key, password = encrypted(ours.key, "opens it"), tmp_path / "key-password"
    password.write_text("opens it\n")

    def check(**given: Any) -> None:
        certificate = str(ours.certificate)
        Security(
            SecuritySettings(
                bookie_tls=True, certificate_file=certificate, key_file=str(key), **given
            )
        ).check()

    check(key_password_file=str(password))
    with pytest.raises(SettingsError, match="cannot be decrypted: check"):
        check()  # and it asks nobody on the terminal
    password.write_text("does not open it")
    with pytest.raises(SettingsError, match="cannot be decrypted") as caught:
        check(key_password_file=str(password))
    assert "does not open it" not in str(caught.value)


def test_wrong_certificate_files_are_named(authority: Authority, tmp_path: Path) -> None:
    ours, other = authority.issue("a"), authority.issue("b")
    empty = tmp_path / "empty"
    empty.write_text("")

    def told(**given: Any) -> str:
        given = {key: str(value) for key, value in given.items()}
        with pytest.raises(SettingsError) as caught:
            Security(SecuritySettings(bookie_tls=True, **given)).check()
        return str(caught.value)

    assert told(ca_file=empty) == f"security.ca_file: {empty} holds no PEM certificate"
    assert told(certificate_file=empty) == (
        f"security.certificate_file: {empty} holds no PEM certificate"
    )
    assert told(certificate_file=ours.certificate) == (
        f"security.certificate_file: {ours.certificate} holds no PEM private key"
    )
    assert told(certificate_file=ours.certificate, key_file=ours.certificate) == (
        f"security.key_file: {ours.certificate} holds no PEM private key"
    )
    assert told(certificate_file=ours.certificate, key_file=other.key) == (
        f"security.key_file: {other.key} is not the key of the certificate in "
        "security.certificate_file"
    )
    assert "security.ca_file: cannot read /nowhere: no such file" in told(ca_file="/nowhere")


def test_a_certificate_may_be_renewed_before_its_key(authority: Authority, tmp_path: Path) -> None:
    old, new = authority.issue("old"), authority.issue("new")
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    certificate.write_bytes(old.certificate.read_bytes())
    key.write_bytes(old.key.read_bytes())
    security = Security(
        SecuritySettings(bookie_tls=True, certificate_file=str(certificate), key_file=str(key))
    )
    first = security.bookie_tls()

    certificate.write_bytes(new.certificate.read_bytes())
    assert security.bookie_tls() is first
    key.write_bytes(new.key.read_bytes())
    assert security.bookie_tls() is not first


# --- Failed handshakes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"),
    [
        pytest.param(
            ConnectionResetError(), "closed the connection during the TLS handshake", id="reset"
        ),
        pytest.param(ssl.SSLEOFError(), "closed the connection", id="end of the stream"),
        pytest.param(TimeoutError(), "did not finish the TLS handshake in time", id="silence"),
        pytest.param(
            ConnectionAbortedError(), "did not finish the TLS handshake in time", id="asyncio's own"
        ),
        pytest.param(ssl.SSLError(), "the TLS handshake with the bookie failed", id="unknown"),
    ],
)
def test_every_failure_of_tls_is_explained(error: Exception, told: str) -> None:
    text = tls_failure(error, SecuritySettings(), server="the bookie", host="b")

    assert told in text
