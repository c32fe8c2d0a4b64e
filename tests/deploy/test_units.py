"""The files for systemd, read without systemd. ``.ci/units`` checks them with its own tools."""

import re
import shlex
from pathlib import Path

import pytest

from daemon.http.health import SILENT_MAX_S
from daemon.main_loop import FEEDS_PER_WATCHDOG, TICK_S
from daemon.node import HTTP_STOP_TIMEOUT_S, STOP_TIMEOUT_S
from tests.deploy.given_commands import refusal

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted([*DEPLOY.glob("*.service"), *DEPLOY.glob("*.timer")])
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
SECTIONS = {".service": {"Unit", "Service", "Install"}, ".timer": {"Unit", "Timer", "Install"}}
BINARY = "/opt/bookmender/bin/bookmender"

Unit = dict[str, dict[str, list[str]]]


def parse(text: str) -> Unit:
    """Return the values by section and key. A key may have several values."""
    unit: Unit = {}
    section: dict[str, list[str]] | None = None
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if not line.strip() or line.startswith(("#", ";")):
            continue
        if found := re.fullmatch(r"\[(\w+)\]", line):
            section = unit.setdefault(found[1], {})
            continue
        assignment = re.fullmatch(r"([A-Z]\w+)=(.*)", line)
        assert assignment is not None, f"not an assignment: {line}"
        assert section is not None, f"outside of a section: {line}"
        section.setdefault(assignment[1], []).append(assignment[2])
    return unit


def read(path: Path) -> Unit:
    return parse(path.read_text())


@pytest.fixture
def service() -> dict[str, list[str]]:
    return read(DEPLOY / "bookmender.service")["Service"]


def seconds(value: str) -> float:
    found = re.fullmatch(r"(\d+)(s|min)", value)
    assert found is not None, value
    return int(found[1]) * {"s": 1, "min": 60}[found[2]]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_has_known_sections_only(path: Path) -> None:
    unit = read(path)

    assert unit["Unit"]["Description"]
    assert set(unit) <= SECTIONS[path.suffix]


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_unit_runs_a_command_that_exists(path: Path) -> None:
    (line,) = read(path)["Service"]["ExecStart"]
    binary, *arguments = shlex.split(line)

    assert binary == BINARY
    assert refusal(arguments) is None


def test_systemd_waits_longer_than_the_node_takes_to_stop(service: dict[str, list[str]]) -> None:
    (timeout,) = service["TimeoutStopSec"]

    assert seconds(timeout) >= 2 * (STOP_TIMEOUT_S + HTTP_STOP_TIMEOUT_S)


def test_the_node_reports_to_systemd(service: dict[str, list[str]]) -> None:
    (watchdog,) = service["WatchdogSec"]

    assert service["Type"] == ["notify"]
    assert service["NotifyAccess"] == ["main"]
    assert "AF_UNIX" in service["RestrictAddressFamilies"][0].split(), "the socket of systemd"
    assert seconds(watchdog) / FEEDS_PER_WATCHDOG > TICK_S
    assert seconds(watchdog) > SILENT_MAX_S, "a disk that is slow for once is no reason to restart"


def test_a_reload_sends_the_signal_of_a_reload(service: dict[str, list[str]]) -> None:
    assert service["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_the_user_of_a_unit_is_created(path: Path) -> None:
    (user,) = read(path)["Service"]["User"]
    users = (DEPLOY / "sysusers.d" / "bookmender.conf").read_text()

    assert re.search(rf"^u {user} - ", users, flags=re.MULTILINE)


def test_folders_are_created_with_the_owner_who_writes_to_them(
    service: dict[str, list[str]],
) -> None:
    lines = (DEPLOY / "tmpfiles.d" / "bookmender.conf").read_text().splitlines()
    folders = {
        path: (mode, user)
        for kind, path, mode, user, _group, _age in (
            line.split() for line in lines if not line.startswith("#")
        )
        if kind == "d"
    }
    (mode,), (user,) = service["StateDirectoryMode"], service["User"]
    state = f"/var/lib/{service['StateDirectory'][0]}"

    assert folders[state] == folders[f"{state}/journal"] == (mode, user)
    assert folders["/etc/bookmender"] == ("0755", "root"), "commands of all users read settings"


def test_the_installation_in_the_guide_is_that_of_the_unit() -> None:
    guide = (ROOT / "docs" / "install.md").read_text()
    header = (DEPLOY / "bookmender.service").read_text().partition("[Unit]")[0]
    steps = re.findall(r"^#   (?!systemctl)(.+)$", header, flags=re.MULTILINE)

    assert len(steps) > 5
    assert [step for step in steps if step not in guide] == []
    files = re.findall(r"install -D -m 0644 (\S+)", header)
    assert [file for file in files if not (DEPLOY / file).is_file()] == []
