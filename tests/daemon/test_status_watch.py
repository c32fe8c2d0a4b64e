"""``bookmender status --watch``, when the state cannot be read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from daemon.admin_session import AdminSession
from daemon.cli import status_watch
from daemon.settings import Settings
from daemon.status.gathering import gather_status
from ledgers.errors import UnavailableError
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time


@in_virtual_time
async def test_it_says_that_the_state_is_old_and_shows_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, shown = await Cluster.start(), list[str]()
    gather, answers = gather_status, iter(["state", "silence", "error", "state"])

    @asynccontextmanager
    async def opened(settings: Settings) -> AsyncIterator[AdminSession]:
        yield visiting(cluster)

    async def gather_or_fail(here: AdminSession) -> object:
        match next(answers):
            case "silence":
                await asyncio.sleep(100)
            case "error":
                raise UnavailableError("nothing listens there")
        return await gather(here)

    monkeypatch.setattr(status_watch, "admin_session", opened)
    monkeypatch.setattr(status_watch, "gather_status", gather_or_fail)
    settings = Settings(metadata_service_uri="zk://zk/ledgers")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await status_watch.watch_each(settings, 2, shown.append)

    assert [text.partition("  ")[0] for text in shown] == ["UNKNOWN"] * 4
    fresh, silent, failed, again = shown
    assert fresh.startswith("UNKNOWN  NO_AUDITOR")
    assert "cannot be read: ZooKeeper does not answer.\nThe last state is" in silent
    assert "cannot be read: nothing listens there" in failed
    assert "    UNKNOWN  NO_AUDITOR" in failed, "the last state is shown below"
    assert again.startswith("UNKNOWN  NO_AUDITOR")
