"""The session of a command."""

import pytest
from click.testing import CliRunner

from daemon import admin_session
from daemon.status.command import status


@pytest.mark.parametrize("notice_s", [0.0, 60.0])
def test_a_command_says_that_it_waits_for_zookeeper(
    notice_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_session, "NOTICE_S", notice_s)
    environment = {
        "BOOKMENDER_METADATA_SERVICE_URI": "zk+hierarchical://127.0.0.1:1/ledgers",
        "BOOKMENDER_ZOOKEEPER_CONNECT_TIMEOUT_S": "0.6",
    }

    ran = CliRunner().invoke(status, ["-o", "json"], env=environment)

    told = "Waiting for ZooKeeper (127.0.0.1:1), at most 0.6 s."
    assert (told in ran.stderr) is (notice_s == 0.0)
    assert ran.exception is not None
    assert ran.stdout == ""
