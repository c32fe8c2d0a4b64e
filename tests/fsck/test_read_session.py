"""Sessions of executors and of the driver, with the timeouts of the run."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from auditor.fsck.budget import fixed_pace
from auditor.fsck.executor import open_executor
from auditor.fsck.ledger_list import list_ledger_ids
from auditor.fsck.options import FsckOptions, SessionTimeouts
from ledgers.errors import SettingsError, UnavailableError
from ledgers.security import SecuritySettings
from ledgers.zookeeper.store import ZooKeeperStore

SECURITY = SecuritySettings(zookeeper_tls=True)
OPTIONS = FsckOptions(
    metadata_service_uri="zk://127.0.0.1:1/ledgers",
    timeouts=SessionTimeouts(session_s=3, connect_s=4),
    security=SECURITY,
)


async def _execute() -> None:
    async with open_executor(OPTIONS, fixed_pace):
        pass


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(_execute, id="an executor"),
        pytest.param(lambda: list_ledger_ids(OPTIONS), id="the listing"),
    ],
)
def test_a_session_has_the_options_of_the_run(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], Awaitable[object]]
) -> None:
    asked: list[dict[str, object]] = []

    async def refuse(hosts: str, **options: object) -> ZooKeeperStore:
        asked.append(options)
        raise UnavailableError("nobody is there")

    async def try_it() -> None:
        with pytest.raises(UnavailableError):
            await work()

    monkeypatch.setattr(ZooKeeperStore, "open", refuse)
    asyncio.run(try_it())

    assert asked == [{"session_timeout_s": 3, "connect_timeout_s": 4, "security": SECURITY}]


def test_a_file_that_an_executor_lacks_is_named_with_its_host() -> None:
    """The driver's host has the file, so the path alone would mislead."""
    lacking = SecuritySettings(zookeeper_tls=True, ca_file="/no/such/ca.pem")

    async def open_it() -> None:
        async with open_executor(replace(OPTIONS, security=lacking), fixed_pace):
            pass

    with pytest.raises(SettingsError) as caught:
        asyncio.run(open_it())

    assert "security.ca_file: cannot read /no/such/ca.pem" in str(caught.value)
    assert f"on {socket.gethostname()}, a host of executors" in str(caught.value)
