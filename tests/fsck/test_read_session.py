"""Sessions of executors, and of what they look up: with the time-outs that they were given."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from auditor.fsck.budget import FixedPace
from auditor.fsck.executor import open_executor
from auditor.fsck.ledger_list import list_ledger_ids, unchanged_ledgers
from auditor.fsck.options import FsckOptions, SessionTimeouts
from ledgers.errors import UnavailableError
from ledgers.zookeeper.store import ZooKeeperStore

OPTIONS = FsckOptions(
    metadata_service_uri="zk://127.0.0.1:1/ledgers",
    timeouts=SessionTimeouts(session_s=3, connect_s=4),
)


async def _execute() -> None:
    async with open_executor(OPTIONS, FixedPace):
        pass


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(_execute, id="an executor"),
        pytest.param(lambda: unchanged_ledgers(OPTIONS, {1: (1, 1)}), id="what has not changed"),
        pytest.param(
            lambda: list_ledger_ids(OPTIONS.metadata_service_uri, timeouts=OPTIONS.timeouts),
            id="the listing",
        ),
    ],
)
def test_a_session_is_opened_with_the_time_outs_of_the_run(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], Awaitable[object]]
) -> None:
    asked: list[dict[str, float]] = []

    async def refuse(hosts: str, **timeouts: float) -> ZooKeeperStore:
        asked.append(timeouts)
        raise UnavailableError("nobody is there")

    async def try_it() -> None:
        with pytest.raises(UnavailableError):
            await work()

    monkeypatch.setattr(ZooKeeperStore, "open", refuse)
    asyncio.run(try_it())

    assert asked == [{"session_timeout_s": 3, "connect_timeout_s": 4}]
