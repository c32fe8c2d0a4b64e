"""Variables of Kubernetes Services have our prefix. They are ignored; mistyped settings are not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.settings import ENVIRONMENT_PREFIX, is_of_service, load_settings, service_variables
from ledgers.errors import SettingsError
from tests.daemon.settings_given import URI, VARIABLE

OF_SERVICES = {
    "BOOKMENDER_SERVICE_HOST": "10.96.0.7",
    "BOOKMENDER_SERVICE_PORT": "8080",
    "BOOKMENDER_SERVICE_PORT_HTTP": "8080",
    "BOOKMENDER_PORT": "tcp://10.96.0.7:8080",
    "BOOKMENDER_PORT_8080_TCP": "tcp://10.96.0.7:8080",
    "BOOKMENDER_PORT_8080_TCP_ADDR": "10.96.0.7",
    "BOOKMENDER_PORT_8080_TCP_PORT": "8080",
    "BOOKMENDER_PORT_8080_TCP_PROTO": "tcp",
    "BOOKMENDER_PORT_53_UDP": "udp://10.96.0.7:53",
    "BOOKMENDER_PORT_53_UDP_PROTO": "udp",
    "BOOKMENDER_NODE_SERVICE_HOST": "fd00::7",
    "BOOKMENDER_NODE_PORT": "tcp://[fd00::7]:9090",
    "BOOKMENDER_NODE_PORT_9090_TCP_ADDR": "fd00::7",
}
"""Variables that Kubernetes sets in a namespace with Services named bookmender and
bookmender-node."""


def test_a_variable_of_a_service_is_recognised() -> None:
    """The last ones are of Services whose names end like a variable."""
    url = "tcp://10.96.0.7:80"
    for name, value in (
        *OF_SERVICES.items(),
        ("BOOKMENDER_SERVICE_PORT", url),
        ("BOOKMENDER_SERVICE_PORT_80_TCP", url),
        ("BOOKMENDER_PORT_PORT", url),
    ):
        assert is_of_service(name, value), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("BOOKMENDER_SERVICE_HOST", "not an address", id="a host is an address"),
        pytest.param("BOOKMENDER_SERVICE_HOST", "face", id="hexadecimal digits are no address"),
        pytest.param("BOOKMENDER_SERVICE_HOST", "None", id="a headless Service has no variables"),
        pytest.param("BOOKMENDER_SERVICE_PORT", "99999", id="a port is below 65536"),
        pytest.param("BOOKMENDER_SERVICE_PORT", "http", id="a port is a number"),
        pytest.param("BOOKMENDER_PORT", "8080", id="a port without a URL"),
        pytest.param("BOOKMENDER_PORT", "http://10.96.0.7:8080", id="another protocol"),
        pytest.param("BOOKMENDER_PORT", "tcp://zk1:8080", id="a URL with a host name"),
        pytest.param("BOOKMENDER_PORT_8080_TCP_PROTO", "TCP", id="a protocol in capitals"),
        pytest.param("BOOKMENDER_ZOOKEEPER_SESION_TIMEOUT_S", "5", id="a mistyped setting"),
        pytest.param("BOOKMENDER_METADATA_SERVICE_URL", "zk://h/ledgers", id="a mistyped URI"),
    ],
)
def test_a_variable_that_no_service_has_is_refused_as_a_setting(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"there is no setting {name}"):
        load_settings(None, {VARIABLE: URI, name: value})


def test_the_value_decides_if_a_setting_has_a_service_name() -> None:
    assert is_of_service("BOOKMENDER_METRICS_PORT", "tcp://10.96.0.7:9090", is_setting=True)
    for name in ("BOOKMENDER_METRICS_PORT", "BOOKMENDER_METRICS_SERVICE_PORT"):
        assert not is_of_service(name, "9090", is_setting=True), "as an operator gives it"


def test_variables_of_services_do_not_change_the_settings() -> None:
    settings = load_settings(None, {VARIABLE: URI} | OF_SERVICES)

    assert settings == load_settings(None, {VARIABLE: URI})


def test_variables_of_services_are_named_together() -> None:
    environment = {VARIABLE: URI, "OTHER_SERVICE_HOST": "10.96.0.8"} | OF_SERVICES

    assert service_variables(environment, prefix=ENVIRONMENT_PREFIX) == tuple(sorted(OF_SERVICES))


def bookmender(*arguments: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, because logs are set up once for a process."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    nobody = {VARIABLE: "zk://127.0.0.1:1/ledgers", "BOOKMENDER_ZOOKEEPER_CONNECT_TIMEOUT_S": "0.5"}
    return subprocess.run(
        [sys.executable, "-m", "daemon", *arguments],
        env=inherited | nobody | OF_SERVICES | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_command_prints_nothing_about_variables_of_services() -> None:
    ended = bookmender("status", "-o", "json", environment={})

    assert json.loads(ended.stdout)["exit_code"] == 3


def test_the_daemon_logs_them_and_settings_without_effect_once(tmp_path: Path) -> None:
    ended = bookmender(
        "daemon",
        environment={
            "BOOKMENDER_NODE_STATE_DIR": str(tmp_path),
            "BOOKMENDER_LOG_LEVEL": "debug",
            "BOOKMENDER_LOG_FORMAT": "json",
            "BOOKMENDER_CHECKS_OVERDUE_AFTER_S": "60",
        },
    )

    lines = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    ignored = [line["variables"] for line in lines if line["event"] == "environment.ignored"]
    assert ignored == [sorted(OF_SERVICES)]
    useless = [line["setting"] for line in lines if line["event"] == "setting.has_no_effect"]
    assert useless == ["checks.overdue_after_s"]
    assert ended.stdout == ""
