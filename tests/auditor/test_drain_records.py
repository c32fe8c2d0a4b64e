"""What the leader says of drains: how far they are, and what leaves them in doubt."""

import asyncio

import pytest

from auditor.draining import LOOK_S
from auditor.records import DrainProgress, DrainRecord, last_drains
from ledgers.model import BookieId
from tests.auditor.drains import OWN, drained_soon, own_marks
from tests.auditor.scenes import SOON_S, with_ledgers
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS


async def told_of(cluster: Cluster, bookie: BookieId) -> DrainProgress:
    record = await last_drains(cluster.store, PATHS)
    assert record is not None
    return record.bookies[bookie]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(
            b'{"version": 1, "scanned_ms": 1, "unreadable_count": 0}', id="without bookies"
        ),
        pytest.param(
            b'{"version": 1, "scanned_ms": 1, "unreadable_count": 0, "bookies": []}', id="a list"
        ),
        pytest.param(
            b'{"version": 1, "scanned_ms": 1, "unreadable_count": 0, "bookies": {"b": {}}}',
            id="a bookie without figures",
        ),
    ],
)
@in_virtual_time
async def test_a_record_that_this_release_cannot_read_is_none(data: bytes) -> None:
    cluster = await Cluster.start()
    await cluster.store.create(f"{OWN.directory}/drains", data)

    assert await last_drains(cluster.store, PATHS) is None


@in_virtual_time
async def test_the_record_says_when_that_was() -> None:
    cluster = await with_ledgers((B1, B2))
    async with drained_soon(cluster, B1):
        record = await last_drains(cluster.store, PATHS)

    assert record == DrainRecord(
        scanned_ms=record.scanned_ms if record else 0,
        bookies={B1: DrainProgress(since_ms=1, ledgers_left=1, ledgers_most=1, is_drained=False)},
    )
    assert 0 <= cluster.clock.wall_ms() - record.scanned_ms < 10_000


# --- Doubts ----------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_ledger_that_cannot_be_read_is_counted_and_stops_nothing() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await cluster.store.set(cluster.manager.path(1), b"rubbish", version=-1)
    async with drained_soon(cluster, B1):
        assert await own_marks(cluster) == [0]
        record = await last_drains(cluster.store, PATHS)

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
@in_virtual_time
async def test_rule_s8_a_bookie_is_not_drained_while_a_ledger_that_cannot_be_read_may_name_it(
    data: bytes,
) -> None:
    cluster = await with_ledgers((B2, B3), (B1, B3))
    await cluster.store.set(cluster.manager.path(1), data, version=-1)
    async with drained_soon(cluster, B1):
        told = await told_of(cluster, B1)

    assert (told.is_drained, told.is_in_doubt) == (False, True)
    assert told.unreadable == (1,)


@in_virtual_time
async def test_a_bookie_that_a_ledger_names_for_certain_is_in_no_doubt() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await cluster.store.set(cluster.manager.path(1), b"rubbish" + B1.encode(), version=-1)
    async with drained_soon(cluster, B1):
        told = await told_of(cluster, B1)

    assert (told.ledgers_left, told.is_drained, told.is_in_doubt) == (1, False, False)
    assert told.unreadable == (1,), "though it is said already"


@in_virtual_time
async def test_of_very_many_that_cannot_be_read_some_are_named_and_all_are_counted() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 25)
    for ledger_id in range(25):
        await cluster.store.set(cluster.manager.path(ledger_id), b"?" + B1.encode(), version=-1)
    async with drained_soon(cluster, B1):
        told = await told_of(cluster, B1)

    assert told.unreadable_count == 25
    assert told.unreadable == tuple(range(20))


@in_virtual_time
async def test_a_doubt_is_over_soon_after_the_ledger_is_readable_again_or_gone() -> None:
    cluster = await with_ledgers((B2, B3))
    await cluster.store.set(cluster.manager.path(0), b"?" + B1.encode(), version=-1)
    async with drained_soon(cluster, B1):
        await asyncio.sleep(3600)
        assert (await told_of(cluster, B1)).is_in_doubt

        await cluster.store.delete(cluster.manager.path(0))
        await asyncio.sleep(LOOK_S + SOON_S)

        assert (await told_of(cluster, B1)).is_drained
