"""The leader's records of drains: their progress, and ledgers that make their end uncertain."""

import asyncio

import pytest

from auditor.draining import LOOK_S
from auditor.records import DrainProgress, DrainRecord, read_drains
from ledgers.model import BookieId
from tests.auditor.drains import OWN, drained_soon, own_marks
from tests.auditor.scenes import SOON_S, with_ledgers
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS


async def told_of(cluster: Cluster, bookie: BookieId) -> DrainProgress:
    record = await read_drains(cluster.store, PATHS)
    assert record is not None
    return record.bookies[bookie]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(
            b'{"version": 1, "scanned_ms": 1, "unreadable_count": 0, "bookies": []}', id="a list"
        ),
        pytest.param(
            b'{"version": 1, "scanned_ms": 1, "unreadable_count": 0, "bookies": {"b": {}}}',
            id="a bookie without figures",
        ),
    ],
)
async def test_a_record_of_a_later_release_counts_as_none(cluster: Cluster, data: bytes) -> None:
    await cluster.store.create(f"{OWN.directory}/drains", data)

    assert await read_drains(cluster.store, PATHS) is None


async def test_the_record_names_its_time() -> None:
    cluster = await with_ledgers((B1, B2))
    async with drained_soon(cluster, B1):
        record = await read_drains(cluster.store, PATHS)

    assert record == DrainRecord(
        scanned_ms=record.scanned_ms if record else 0,
        bookies={B1: DrainProgress(since_ms=1, ledgers_left=1, ledgers_most=1, is_drained=False)},
    )
    assert 0 <= cluster.clock.wall_ms() - record.scanned_ms < 10_000


# --- Uncertain ends -------------------------------------------------------------------------------


async def test_an_unreadable_ledger_is_counted_and_stops_nothing() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await cluster.store.set(cluster.manager.path(1), b"rubbish", version=-1)
    async with drained_soon(cluster, B1):
        assert await own_marks(cluster) == [0]
        record = await read_drains(cluster.store, PATHS)

    assert record is not None
    assert record.unreadable_count == 1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"rubbish that names " + B1.encode(), id="with its id in it"),
        pytest.param(b"rubbish that names " + B4.encode(), id="without its id"),
        pytest.param(b"", id="empty"),
    ],
)
async def test_rule_s8_unreadable_ledgers_delay_the_end_of_a_drain(
    data: bytes,
) -> None:
    """An unreadable ledger may name the draining bookie."""
    cluster = await with_ledgers((B2, B3), (B1, B3))
    await cluster.store.set(cluster.manager.path(1), data, version=-1)
    async with drained_soon(cluster, B1):
        told = await told_of(cluster, B1)

    assert (told.is_drained, told.is_in_doubt) == (False, True)
    assert told.unreadable == (1,)


async def test_a_bookie_that_a_ledger_names_is_certainly_not_drained() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await cluster.store.set(cluster.manager.path(1), b"rubbish" + B1.encode(), version=-1)
    async with drained_soon(cluster, B1):
        told = await told_of(cluster, B1)

    assert (told.ledgers_left, told.is_drained, told.is_in_doubt) == (1, False, False)
    assert told.unreadable == (1,), "though it is said already"


async def test_of_very_many_unreadable_ledgers_some_are_named() -> None:
    """All of them are counted."""
    cluster = await with_ledgers(*[(B1, B2)] * 25)
    for ledger_id in range(25):
        await cluster.store.set(cluster.manager.path(ledger_id), b"?" + B1.encode(), version=-1)
    async with drained_soon(cluster, B1):
        told = await told_of(cluster, B1)

    assert told.unreadable_count == 25
    assert told.unreadable == tuple(range(20))


async def test_a_drain_continues_once_the_ledger_is_readable_or_gone() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.store.set(cluster.manager.path(0), b"?" + B1.encode(), version=-1)
    async with drained_soon(cluster, B1):
        await asyncio.sleep(3600)
        assert (await told_of(cluster, B1)).is_in_doubt

        await cluster.store.delete(cluster.manager.path(0))
        await asyncio.sleep(LOOK_S + SOON_S)

        assert (await told_of(cluster, B1)).is_drained
