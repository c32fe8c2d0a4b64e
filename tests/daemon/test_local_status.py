"""The state of a bookie, from its process and its registration."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from daemon.cli.local import local
from daemon.local.spec import ClusterSpec
from daemon.local.status import ServerStatus, bookie_state, status_of
from ledgers.errors import SettingsError
from ledgers.model import BookieId

BOOKIE = BookieId("127.0.0.1:20002")
HERE = frozenset({BOOKIE})
NONE: frozenset[BookieId] = frozenset()


@pytest.mark.parametrize(
    ("is_running", "writable", "read_only", "state"),
    [
        pytest.param(True, HERE, NONE, "writable", id="registered"),
        pytest.param(True, NONE, HERE, "read-only", id="registered as read-only"),
        pytest.param(True, HERE, HERE, "writable", id="becoming read-only"),
        pytest.param(True, NONE, NONE, "unregistered", id="its session has expired"),
        pytest.param(True, None, None, "unknown", id="ZooKeeper does not answer"),
        pytest.param(False, NONE, NONE, "down", id="ended"),
        pytest.param(False, HERE, NONE, "down", id="its session has not expired yet"),
        pytest.param(False, None, None, "down", id="ended, and ZooKeeper too"),
    ],
)
def test_the_state_of_a_bookie(
    is_running: bool,
    writable: frozenset[BookieId] | None,
    read_only: frozenset[BookieId] | None,
    state: str,
) -> None:
    found = bookie_state(BOOKIE, is_running=is_running, writable=writable, read_only=read_only)

    assert found == state


def test_a_cluster_is_whole_when_every_bookie_is_writable() -> None:
    spec = ClusterSpec(zookeeper_port=20_001, bookie_ports=(20_002, 20_003))
    writable = ServerStatus(address=BOOKIE, state="writable")
    down = ServerStatus(address=BOOKIE, state="down")
    status = status_of(spec, Path())

    assert not status.is_whole
    assert not replace(status, bookies=(writable, down)).is_whole
    assert replace(status, bookies=(writable, writable)).is_whole


def test_advice_about_another_folder_names_the_folder(tmp_path: Path) -> None:
    elsewhere = tmp_path / "another one"

    error = CliRunner().invoke(local, ["status", "--data", str(elsewhere)]).exception

    assert isinstance(error, SettingsError)
    assert f"`bookmender local up --data '{elsewhere}'` creates one" in str(error)
