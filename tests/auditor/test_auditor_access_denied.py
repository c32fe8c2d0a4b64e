"""Our znodes with denied access: the leader works without them, and its term does not end."""

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from auditor.ledger_map_updater import LedgerMapRecord
from ledgers.errors import UnauthorizedError
from ledgers.store import Create, MetadataStore, MultiFailed, Operation, OperationResult, SetData
from tests.auditor.auditing import leading
from tests.auditor.scenes import marked_soon, with_ledgers
from tests.replication.cluster import shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS

NOTE = LedgerMapRecord(session_id=1, written_ms=1, is_complete=True, ledger_count=1)
RECORDS = [f"{PATHS.private.directory}/{name}" for name in ("identities", "absences", "losses")]


def refuse_writes(store: MetadataStore, path: str) -> None:
    multi = store.multi

    async def refused(operations: Sequence[Operation]) -> list[OperationResult]:
        for index, each in enumerate(operations):
            if isinstance(each, Create | SetData) and each.path == path:
                raise MultiFailed(index, UnauthorizedError("the ACL shuts us out"))
        return await multi(operations)

    store.multi = refused  # type: ignore[method-assign]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.rpartition("/")[2])
@pytest.mark.parametrize("is_readable", [False, True], ids=["for reading", "for writing"])
async def test_denied_access_to_the_leaders_records_is_survived(
    path: str, is_readable: bool
) -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.store.create(path, b'{"version": 1}', with_parents=True)
    async with leading(cluster) as leader:
        refuse_writes(leader.store, path)
        if not is_readable:
            shut_out(leader.store, path)
        with capture_logs() as logs:
            auditor = asyncio.create_task(leader.auditor.run())
            await asyncio.sleep(5)
            await cluster.kill(B1)
            assert await marked_soon(cluster) == [0]
            await asyncio.sleep(180)
            assert not auditor.done()
            await cluster.kill(B3)
            assert await marked_soon(cluster) == [0, 1]

        told = [line for line in logs if line["event"] == "record.access_denied"]
        assert {line["path"] for line in told} == {path}
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)


async def test_denied_access_to_the_ledger_map_record_is_survived() -> None:
    cluster = await with_ledgers((B1, B2))
    async with leading(cluster) as leader:
        refuse_writes(leader.store, PATHS.ledger_map)

        with capture_logs() as logs:
            await leader.records.write(NOTE)

    assert [line["path"] for line in logs] == [PATHS.ledger_map]


async def test_an_unreadable_disable_switch_counts_as_set() -> None:
    cluster = await with_ledgers((B1, B2))
    async with leading(cluster) as leader:
        auditor = asyncio.create_task(leader.auditor.run())
        await asyncio.sleep(5)
        shut_out(leader.store, PATHS.disable)
        await cluster.store.create(PATHS.disable)
        await cluster.kill(B1)
        await asyncio.sleep(30)
        assert not auditor.done()
        assert await cluster.marked() == []

        await cluster.store.delete(PATHS.disable)
        assert await marked_soon(cluster) == [0]
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)
