"""Reading all metadata for the ledgers that a loss affects."""

from collections.abc import Collection, Sequence

import pytest

from auditor import scan
from auditor.scan import Scan, may_be_named, scan_ledgers
from ledgers.errors import UnavailableError
from ledgers.model import BookieId
from ledgers.store import Operation
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4


async def scanned(cluster: Cluster, lost: Collection[BookieId]) -> Scan:
    return await scan_ledgers(cluster.manager, lost=lost)


async def test_all_ledgers_that_name_a_lost_bookie_are_found(cluster: Cluster) -> None:
    for ledger_id in range(30):
        members = (B1, B2, B3) if ledger_id % 3 else (B1, B4, B3)
        await cluster.write_ledger(members, ledger_id=ledger_id, last=-1)

    found = await scanned(cluster, {B4})

    assert found.ledger_count == 30
    assert sorted(x.ledger_id for x in found.underreplicated) == list(range(0, 30, 3))
    assert {x.lost for x in found.underreplicated} == {(B4,)}
    assert found.unreadable == []


async def test_more_ledgers_than_are_read_at_once_are_all_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan, "READS_AT_ONCE", 4)
    cluster = await Cluster.start()
    for ledger_id in range(10):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=-1)

    assert len((await scanned(cluster, {B1})).underreplicated) == 10


async def test_rule_s8_an_unreadable_ledger_is_reported(cluster: Cluster) -> None:
    """All others are judged."""
    for ledger_id in range(10):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=-1)
    for ledger_id in (3, 8):
        await cluster.store.set(cluster.manager.path(ledger_id), b"rubbish", version=-1)

    found = await scanned(cluster, {B1})

    assert found.unreadable == [3, 8]
    assert sorted(x.ledger_id for x in found.underreplicated) == [0, 1, 2, 4, 5, 6, 7, 9]
    assert found.ledger_count == 10


async def test_a_ledger_with_denied_access_may_name_any_bookie(cluster: Cluster) -> None:
    """It is reported."""
    for ledger_id in range(3):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=-1)
    shut_out(cluster.store, cluster.manager.path(1))

    found = await scanned(cluster, {B1})
    named = await may_be_named(cluster.store, cluster.manager, found.unreadable, [B3])

    assert found.unreadable == [1]
    assert [each.ledger_id for each in found.underreplicated] == [0, 2]
    assert named == {B3: [1]}


async def test_a_ledger_deleted_during_the_scan_is_no_failure(cluster: Cluster) -> None:
    for ledger_id in range(5):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=-1)
    listing = cluster.manager.ledger_ids

    async def delete_once_listed(**_):  # type: ignore[no-untyped-def]
        async for ledger_ids in listing():
            await cluster.manager.delete(2, version=0)
            yield ledger_ids

    cluster.manager.ledger_ids = delete_once_listed  # type: ignore[assignment,method-assign]

    found = await scanned(cluster, {B1})

    assert sorted(x.ledger_id for x in found.underreplicated) == [0, 1, 3, 4]
    assert found.ledger_count == 4


async def test_rule_s8_an_interrupted_listing_fails_the_scan(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), last=-1)

    def lose_all(store: MemoryStore, operations: Sequence[Operation]) -> Fault:
        return Fault.LOST_REPLY

    cluster.tree.faults = lose_all

    with pytest.raises(UnavailableError):
        await scanned(cluster, {B1})
