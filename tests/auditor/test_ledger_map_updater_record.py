"""The leader's record of the progress of its ledger map."""

import asyncio

import pytest

from auditor.ledger_map_updater import (
    WRITE_INTERVAL_S,
    LedgerMapRecord,
    LedgerMapReporter,
    LedgerMapUpdater,
    ScanProgress,
)
from auditor.records import read_leader_record
from tests.auditor.auditing import leading
from tests.auditor.scenes import with_ledgers
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS


def unbuilt(cluster: Cluster) -> LedgerMapUpdater:
    """Return an updater that does not run: the test sets its progress."""
    return LedgerMapUpdater(store=cluster.store, manager=cluster.manager, clock=cluster.clock)


async def test_it_is_written_at_the_start_periodically_and_at_the_end(cluster: Cluster) -> None:
    updater, told = unbuilt(cluster), list[LedgerMapRecord]()

    async def note(each: LedgerMapRecord) -> None:
        told.append(each)

    teller = LedgerMapReporter(updater, note, session_id=5)
    updater.progress = ScanProgress(expected_count=1_000, started_s=0.0, read_count=10)
    await teller.run_once()
    updater.progress.read_count = 20
    await teller.run_once()
    await asyncio.sleep(WRITE_INTERVAL_S)
    await teller.run_once()

    assert [(each.is_complete, each.read_count) for each in told] == [(False, 10), (False, 20)]
    assert (told[0].expected_count, told[0].session_id) == (1_000, 5)


async def test_the_next_leader_overwrites_it() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B2))
    for _ in range(2):
        async with leading(cluster) as leader:
            await asyncio.sleep(1)
            session_id = leader.store.session_id
            teller = LedgerMapReporter(leader.updater, leader.records.write, session_id=session_id)
            await teller.run_once()
            found = await read_leader_record(cluster.store, PATHS, LedgerMapRecord)

        assert found is not None
        assert (found.session_id, found.is_complete, found.ledger_count) == (session_id, True, 2)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"version": 1, "session_id": "x"}'], ids=repr
)
async def test_an_unreadable_record_counts_as_none(cluster: Cluster, data: bytes) -> None:
    assert await read_leader_record(cluster.store, PATHS, LedgerMapRecord) is None

    await cluster.store.create(PATHS.ledger_map, data, with_parents=True)

    assert await read_leader_record(cluster.store, PATHS, LedgerMapRecord) is None
