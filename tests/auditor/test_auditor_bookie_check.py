"""The periodic bookie check compares all ledgers with the registered bookies."""

import asyncio

import pytest

from auditor.settings import AuditorSettings
from ledgers.model import BookieId
from tests.auditor.auditing import auditing
from tests.auditor.scenes import (
    SOON_S,
    count_audits,
    marked_soon,
    with_ledgers,
)
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS


async def test_all_metadata_is_compared_with_the_bookies_periodically() -> None:
    cluster = await with_ledgers((B1, B2))
    settings = AuditorSettings(bookie_check_interval_s=100)
    async with auditing(cluster, settings=settings) as leader:
        audits = count_audits(leader)
        await asyncio.sleep(350)

        assert len(audits) == 4
        await cluster.write_ledger((B1, BookieId("gone:3181")), ledger_id=9)
        await asyncio.sleep(101)
        assert await cluster.marked() == [9]


@pytest.mark.compat(
    "AuditorLedgerCheckerTest.testDelayedAuditWithPeriodicBookieCheck", verdict="same"
)
async def test_a_periodic_check_does_not_shorten_the_recovery_delay() -> None:
    cluster = await with_ledgers((B1, B2))
    settings = AuditorSettings(bookie_check_interval_s=10, lost_bookie_recovery_delay_s=60)
    async with auditing(cluster, settings=settings):
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)

        await asyncio.sleep(58)
        assert await cluster.marked() == []
        await asyncio.sleep(4)
        assert await cluster.marked() == [0]


async def test_a_periodic_check_restores_deleted_marks() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=AuditorSettings(bookie_check_interval_s=100)):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]
        await cluster.store.delete(PATHS.mark(0))

        await asyncio.sleep(100)
        assert await cluster.marked() == [0]
