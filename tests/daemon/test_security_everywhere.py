"""No connection of the product is opened without the settings of ``[security]``."""

import ast
from pathlib import Path

import pytest

from tests.daemon.settings_given import URI_LINE, load, refused

ROOT = Path(__file__).parents[2]
OPENS = {
    "BulkTransfers": "connector",
    "open_bookies": "connector",
    "ZooKeeperStore.open": "security",
}
"""What opens connections, and the argument that secures them. It has a default, for tests."""


def unsecured(source: str) -> list[str]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        f"line {call.lineno}: {name}"
        for call in calls
        if (name := ast.unparse(call.func)) in OPENS
        and OPENS[name] not in [keyword.arg for keyword in call.keywords]
    ]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        pytest.param("open_bookies(resolve)", 1, id="without"),
        pytest.param("ZooKeeperStore.open(hosts, security=s)", 0, id="with"),
    ],
)
def test_a_call_without_security_is_seen(source: str, count: int) -> None:
    assert len(unsecured(source)) == count


@pytest.mark.parametrize("package", ["daemon", "auditor", "replication"])
def test_every_connection_is_secured_as_the_settings_say(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): calls
        for path in (ROOT / package).rglob("*.py")
        if (calls := unsecured(path.read_text()))
    }

    assert found == {}


def test_the_settings_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    text = URI_LINE + '[security]\nbookie_tls = true\nca_file = "/etc/ca.pem"\n'

    settings = load(tmp_path, text, SECURITY_ZOOKEEPER_TLS="true").security

    assert (settings.bookie_tls, settings.zookeeper_tls) == (True, True)
    assert settings.ca_file == "/etc/ca.pem"


@pytest.mark.parametrize("name", ["zookeeper_password", "bookie_password", "key_password"])
def test_a_password_is_no_setting_and_is_not_shown(tmp_path: Path, name: str) -> None:
    """Passwords are in files. A mistaken attempt to write one into the settings hints at them."""
    told = refused(tmp_path, URI_LINE + f'[security]\n{name} = "topsecret"\n')

    assert f"security.{name}_file" in told
    assert "topsecret" not in told
    assert "topsecret" not in refused(tmp_path, **{f"SECURITY_{name.upper()}": "topsecret"})
