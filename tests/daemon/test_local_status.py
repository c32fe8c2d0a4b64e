"""The state of a bookie, from its process and its registration."""

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.local.commands import local
from daemon.local.spec import ClusterSpec
from daemon.local.status import BookieState, ServerStatus, at_rest, bookie_state
from ledgers.errors import SettingsError
from ledgers.model import BookieId

BOOKIE = BookieId("127.0.0.1:20002")
HERE = frozenset({BOOKIE})
NONE: frozenset[BookieId] = frozenset()


@pytest.mark.parametrize(
    ("is_running", "writable", "read_only", "state"),
    [
        pytest.param(True, HERE, NONE, BookieState.WRITABLE, id="registered"),
        pytest.param(True, NONE, HERE, BookieState.READ_ONLY, id="registered as read-only"),
        pytest.param(True, HERE, HERE, BookieState.WRITABLE, id="becoming read-only"),
        pytest.param(True, NONE, NONE, BookieState.UNREGISTERED, id="its session has expired"),
        pytest.param(True, None, None, BookieState.UNKNOWN, id="ZooKeeper does not answer"),
        pytest.param(False, NONE, NONE, BookieState.DOWN, id="ended"),
        pytest.param(False, HERE, NONE, BookieState.DOWN, id="its session has not expired yet"),
        pytest.param(False, None, None, BookieState.DOWN, id="ended, and ZooKeeper too"),
    ],
)
def test_the_state_of_a_bookie(
    is_running: bool,
    writable: frozenset[BookieId] | None,
    read_only: frozenset[BookieId] | None,
    state: BookieState,
) -> None:
    found = bookie_state(BOOKIE, is_running=is_running, writable=writable, read_only=read_only)

    assert found is state


def test_a_cluster_is_whole_when_every_bookie_is_writable() -> None:
    spec = ClusterSpec(zookeeper_port=20_001, bookie_ports=(20_002, 20_003))
    writable, down = (
        ServerStatus(address=BOOKIE, state=state.value)
        for state in (BookieState.WRITABLE, BookieState.DOWN)
    )
    status = at_rest(spec, data="")

    assert not status.is_whole
    assert not dataclasses.replace(status, bookies=(writable, down)).is_whole
    assert dataclasses.replace(status, bookies=(writable, writable)).is_whole


def test_advice_about_another_folder_names_the_folder(tmp_path: Path) -> None:
    elsewhere = tmp_path / "another one"

    error = CliRunner().invoke(local, ["status", "--data", str(elsewhere)]).exception

    assert isinstance(error, SettingsError)
    assert f"`bookmender local up --data '{elsewhere}'` creates one" in str(error)
