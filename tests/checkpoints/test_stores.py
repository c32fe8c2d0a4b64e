"""What the recovery relies on, for every kind of receipt store."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints.errors import PositionUnknownError
from checkpoints.model import LogId, ledger_key
from checkpoints.receipts import (
    ClientProcess,
    ClientTable,
    Failure,
    ReceiptRange,
    compact,
)
from checkpoints.stores.sql import SqlClientTable, SqlReceiptStore
from checkpoints.stores.zookeeper import ZooKeeperClientTable, ZooKeeperReceiptStore
from ledgers.errors import ClientDeletedError, ClientFencedError, ConflictError
from tests.checkpoints.stores import (
    KINDS,
    OpenStore,
    RunScenario,
    Scenario,
    receipted,
    receipts,
    run_on,
)
from tests.ledgers.scripted_bookie import in_loop
from tests.memory.store import MemoryStore, MemoryTree


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunScenario:
    return run_on(request, tmp_path)


def on_each_store(scenario: Scenario) -> Callable[[RunScenario], None]:
    """Make a test of a scenario. It runs on an empty store of each kind."""

    def test(run: RunScenario) -> None:
        run(scenario)

    test.__doc__ = scenario.__doc__
    return test


def failure(ledger_id: int, version: int, because: str = "no space") -> Failure:
    return Failure(key=ledger_key(ledger_id), version=version, because=because, time_ms=1_000)


@on_each_store
async def test_a_new_client_has_nothing(open_store: OpenStore) -> None:
    store = await open_store("catalogue")

    assert await store.get_low_watermark() is None
    assert await receipts(store) == []
    assert list(await store.get_failures()) == []


@on_each_store
async def test_everything_outlives_the_process(open_store: OpenStore) -> None:
    store = await open_store("catalogue")
    await store.store_low_watermark(2**62)
    await store.store_checkpoint_range_receipts([ReceiptRange(2**62 + 10, 2**62 + 20)])
    await store.store_failure(failure(1, 7, "ä\0 reason"))
    await store.close()

    store = await open_store("catalogue")

    assert await store.get_low_watermark() == 2**62
    assert await receipts(store) == [(2**62 + 10, 2**62 + 20)]
    (kept,) = await store.get_failures()
    assert (kept.key, kept.version, kept.time_ms) == (ledger_key(1), 7, 1_000)
    assert kept.because.replace("\0", " ") == "ä  reason"


@on_each_store
async def test_the_low_watermark_only_rises(open_store: OpenStore) -> None:
    """A write that is applied late must not lower it."""
    store = await open_store("catalogue")

    for written, stored in ((0, 0), (5, 5), (3, 5), (5, 5), (9, 9)):
        await store.store_low_watermark(written)
        assert await store.get_low_watermark() == stored


@on_each_store
async def test_receipts_come_with_the_highest_begin_first(open_store: OpenStore) -> None:
    store = await open_store("catalogue")

    await store.store_checkpoint_range_receipts([ReceiptRange(30, 39), ReceiptRange(10, 19)])
    await store.store_checkpoint_range_receipts([ReceiptRange(50, 59)])
    await store.store_checkpoint_range_receipts([])

    assert await receipts(store) == [(50, 59), (30, 39), (10, 19)]
    assert await receipts(store, 19) == [(50, 59), (30, 39)]
    assert await receipts(store, 35) == [(50, 59), (30, 39)]
    assert await receipts(store, 59) == []


@on_each_store
async def test_a_receipt_is_extended_and_never_shortened(open_store: OpenStore) -> None:
    store = await open_store("catalogue")
    await store.store_checkpoint_range_receipts([ReceiptRange(10, 19)])

    await store.store_checkpoint_range_receipts([ReceiptRange(10, 29)])
    await store.store_checkpoint_range_receipts([ReceiptRange(10, 15)])

    assert await receipts(store) == [(10, 29)]


@on_each_store
async def test_overlapping_receipts_are_kept(open_store: OpenStore) -> None:
    store = await open_store("catalogue")

    await store.store_checkpoint_range_receipts([ReceiptRange(10, 19), ReceiptRange(15, 29)])
    await store.store_checkpoint_range_receipts([ReceiptRange(12, 13)])

    assert await receipted(store) == set(range(10, 30))


@on_each_store
async def test_a_purge_deletes_what_lies_within_and_is_not_equal(open_store: OpenStore) -> None:
    store = await open_store("catalogue")
    ranges = [(10, 19), (30, 39), (50, 59), (70, 79), (90, 99)]
    await store.store_checkpoint_range_receipts([ReceiptRange(*each) for each in ranges])

    await store.purge_checkpoint_receipts([ReceiptRange(50, 59)])
    await store.purge_checkpoint_receipts([])
    assert await receipts(store) == [ReceiptRange(*each) for each in reversed(ranges)]

    await store.purge_checkpoint_receipts([ReceiptRange(31, 78), ReceiptRange(0, 29)])
    assert await receipts(store) == [(90, 99), (70, 79), (30, 39)]


@on_each_store
async def test_compaction_keeps_the_size_constant(open_store: OpenStore) -> None:
    store = await open_store("catalogue")
    await store.store_low_watermark(9)
    for begin in (60, 20, 40, 10, 50, 30):
        await store.store_checkpoint_range_receipts([ReceiptRange(begin, begin + 9)])
    await store.store_checkpoint_range_receipts([ReceiptRange(80, 89), ReceiptRange(5, 9)])
    await store.store_low_watermark(15)

    await compact(store)

    assert await receipts(store) == [(80, 89), (10, 69)]


@on_each_store
async def test_an_interrupted_compaction_loses_nothing(open_store: OpenStore) -> None:
    store = await open_store("catalogue")
    await store.store_low_watermark(9)
    for begin in (20, 30, 50, 60, 80):
        await store.store_checkpoint_range_receipts([ReceiptRange(begin, begin + 9)])
    expected = await receipted(store)

    for steps in range(10):
        with_limit = _Limited(steps)
        try:
            await compact(store, write=with_limit)
        except InterruptedError:
            assert await receipted(store) == expected

    assert await receipts(store) == [(80, 89), (50, 69), (20, 39)]


class _Limited:
    """Makes so many calls, then raises InterruptedError after one that was applied."""

    def __init__(self, count: int) -> None:
        self._left = count

    async def __call__(self, call: object) -> None:
        assert callable(call)
        await call()
        self._left -= 1
        if self._left < 0:
            raise InterruptedError


@on_each_store
async def test_failures_are_kept_by_object(open_store: OpenStore) -> None:
    store = await open_store("catalogue")

    await store.store_failure(failure(1, 20, "first"))
    await store.store_failure(failure(2, 10))
    await store.store_failure(failure(1, 30, "second"))
    await store.store_failure(failure(1, 25, "late"))

    kept = [(each.key, each.version, each.because) for each in await store.get_failures()]
    assert kept == [(ledger_key(2), 10, "no space"), (ledger_key(1), 30, "second")]


@on_each_store
async def test_a_failure_is_replaced_by_one_of_the_same_version(open_store: OpenStore) -> None:
    store = await open_store("catalogue")

    await store.store_failure(failure(1, 20, "first"))
    await store.store_failure(failure(1, 20, "second"))

    assert [each.because for each in await store.get_failures()] == ["second"]


@on_each_store
async def test_a_failure_is_deleted_up_to_a_version(open_store: OpenStore) -> None:
    store = await open_store("catalogue")
    await store.store_failure(failure(1, 20))
    await store.store_failure(failure(2, 20))

    await store.delete_failure(ledger_key(1), up_to=19)
    await store.delete_failure(ledger_key(2), up_to=20)
    await store.delete_failure(ledger_key(3), up_to=20)

    assert [each.key for each in await store.get_failures()] == [ledger_key(1)]


@on_each_store
async def test_many_clients_share_one_table(open_store: OpenStore) -> None:
    names = ("catalogue", "billing", "a/b", "ä")
    stores = [await open_store(name) for name in names]
    for number, store in enumerate(stores, start=1):
        await store.store_low_watermark(number)
        await store.store_checkpoint_range_receipts([ReceiptRange(10, 10 + number)])
        await store.store_failure(failure(1, number))

    await stores[0].purge_checkpoint_receipts([ReceiptRange(0, 100)])
    await stores[0].delete_failure(ledger_key(1), up_to=100)

    assert await receipts(stores[0]) == []
    for number, store in enumerate(stores[1:], start=2):
        assert await store.get_low_watermark() == number
        assert await receipts(store) == [(10, 10 + number)]
        assert [each.version for each in await store.get_failures()] == [number]


class Place:
    """Znodes in memory, or a database, in which clients have their stores."""

    def __init__(self, *, is_in_znodes: bool, url: str, file: Path) -> None:
        self.tree, self.file = MemoryTree(), file
        self.is_in_znodes = is_in_znodes
        self._session, self._url = MemoryStore(self.tree), url

    async def open(
        self, client: str = "a", **options: Any
    ) -> SqlReceiptStore | ZooKeeperReceiptStore:
        if self.is_in_znodes:
            return await ZooKeeperReceiptStore.open(
                self._session, folder="/clients", client=client, **options
            )
        return await SqlReceiptStore.open(self._url, client=client, **options)

    async def table(self) -> ClientTable:
        if self.is_in_znodes:
            return ZooKeeperClientTable(self._session, folder="/clients")
        return await SqlClientTable.open(self._url)


@pytest.fixture(params=["sqlite", "znodes"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    file = tmp_path / "feed.db"
    file.touch()
    is_postgresql = request.param == "postgresql"
    url = request.getfixturevalue("postgresql") if is_postgresql else f"sqlite:///{file}"
    return Place(is_in_znodes=request.param == "znodes", url=url, file=file)


@pytest.mark.parametrize("place", ["sqlite", "postgresql", "znodes"], indirect=True)
@in_loop
async def test_operators_see_and_change_all_clients(place: Place) -> None:
    table = await place.table()
    first = await place.open("shown", generation=1)
    second = await place.open("shown/2", generation=1)
    await first.store_low_watermark(20)
    await first.store_checkpoint_range_receipts([ReceiptRange(31, 40)])
    await first.store_failure(failure(4711, 25))

    names = [each.name for each in await table.list()]  # other tests share the server
    assert [name for name in names if name.startswith("shown")] == ["shown", "shown/2"]
    assert await table.find("nobody") is None
    found = await table.find("shown")
    assert found is not None
    assert (found.generation, found.low_watermark, found.receipt_count) == (1, 20, 1)
    assert list(found.failures) == [failure(4711, 25)]

    assert await table.order_retries("shown") == 1
    (ordered,) = await first.get_failures()
    assert ordered.is_retry_ordered
    await first.store_failure(failure(4711, 25))
    assert list(await first.get_failures()) == [failure(4711, 25)]

    assert await table.delete("shown")
    assert not await table.delete("shown")
    assert await table.order_retries("shown") == 0
    with pytest.raises(ClientFencedError):
        await first.store_low_watermark(30)
    await second.store_low_watermark(30)
    await asyncio.sleep(0.005)  # epochs follow the time in milliseconds

    again = await place.open("shown", generation=2)
    with pytest.raises(ClientFencedError):
        await first.store_low_watermark(30)
    assert await again.get_low_watermark() is None
    await table.close()
    for store in (first, second, again):
        await store.close()


@in_loop
async def test_receipts_of_an_earlier_feed_are_deleted(place: Place) -> None:
    store = await place.open(generation=1)
    await store.store_low_watermark(20)
    await store.store_checkpoint_range_receipts([ReceiptRange(31, 40)])
    await store.store_failure(failure(4711, 25))
    await store.close()

    same = await place.open(generation=1)
    assert not same.was_reset
    assert await same.get_low_watermark() == 20
    await same.close()
    new = await place.open(generation=2)
    assert new.was_reset
    assert await new.get_low_watermark() is None
    assert await receipts(new) == []
    assert list(await new.get_failures()) == []
    await new.close()

    for _ in range(2):  # the process may have died before it could tell
        new = await place.open(generation=2)
        assert new.was_reset
        await new.close()
    new = await place.open(generation=2)
    await new.store_low_watermark(30)
    await new.close()
    new = await place.open(generation=2)
    assert not new.was_reset
    with pytest.raises(ConflictError):  # by a process that read the chain before
        await place.open(generation=1)
    assert await new.get_low_watermark() == 30
    await new.close()


@on_each_store
async def test_the_log_of_the_receipts_is_kept_until_the_client_begins_again(
    open_store: OpenStore,
) -> None:
    store = await open_store("catalogue")
    assert await store.get_log() is None
    for log_id in (LogId(7, 1_700_000_000_000, 0), LogId(2**62, 1_700_000_000_000, 2**62)):
        await store.store_log(log_id)
        assert await store.get_log() == log_id
    await store.store_low_watermark(20)
    await store.store_checkpoint_range_receipts([ReceiptRange(31, 40)])
    await store.store_failure(failure(1, 25))
    store = await open_store("catalogue")
    assert await store.get_log() == log_id

    await store.reset()

    assert await store.get_log() is None
    assert await store.get_low_watermark() is None
    assert await receipts(store) == []
    assert list(await store.get_failures()) == []
    await store.store_low_watermark(3)
    assert await store.get_low_watermark() == 3


@in_loop
async def test_a_process_is_not_fenced_by_a_store_that_was_restored(place: Place) -> None:
    """Yesterday's process is in the backup. It does not run any more."""
    yesterday, today = ClientProcess(), ClientProcess()
    store = await place.open(process=yesterday)
    await store.store_low_watermark(20)
    await store.close()
    nodes, database = place.tree.nodes.copy(), place.file.read_bytes()
    await (await place.open(process=today)).close()
    place.tree.nodes = nodes
    place.file.write_bytes(database)

    store = await place.open(process=today)
    assert store.was_reset
    assert await store.get_low_watermark() is None
    await store.store_low_watermark(30)
    await store.close()
    store = await place.open(process=today)
    assert not store.was_reset
    await store.close()
    store = await place.open(process=today, is_restored=True)
    assert store.was_reset
    await store.close()

    await (await place.open(process=ClientProcess())).close()
    with pytest.raises(ClientFencedError):
        await place.open(process=today, is_restored=True)


@in_loop
async def test_an_open_store_that_was_restored_is_not_fenced(place: Place) -> None:
    """The session of ZooKeeper, or the connection, survived."""
    process = ClientProcess()
    await (await place.open(process=process)).close()
    nodes = place.tree.nodes.copy()
    store = await place.open(process=process)
    place.tree.nodes = nodes
    if not place.is_in_znodes:
        with sqlite3.connect(place.file) as database:
            database.execute("UPDATE feed_clients SET epoch = epoch - 1")

    with pytest.raises(PositionUnknownError):
        await store.get_low_watermark()
    with pytest.raises(PositionUnknownError):
        await store.store_low_watermark(5)
    await store.close()


@in_loop
async def test_a_process_of_a_deleted_client_cannot_open_it_again(place: Place) -> None:
    process = ClientProcess()
    store, table = await place.open(process=process), await place.table()
    await table.delete("a")

    for call in (
        store.get_low_watermark,
        lambda: store.store_low_watermark(5),
        lambda: place.open(process=process),
    ):
        with pytest.raises(ClientDeletedError):
            await call()
    assert await table.find("a") is None
    await table.close()
    await store.close()


@on_each_store
async def test_a_later_process_fences_the_earlier(open_store: OpenStore) -> None:
    earlier = await open_store("catalogue")
    await earlier.store_low_watermark(5)
    other = await open_store("billing")
    later = await open_store("catalogue")

    for call in (
        lambda: earlier.store_low_watermark(7),
        earlier.get_low_watermark,
        lambda: earlier.store_checkpoint_range_receipts([ReceiptRange(10, 19)]),
        lambda: receipts(earlier),
        lambda: earlier.purge_checkpoint_receipts([ReceiptRange(0, 100)]),
        lambda: earlier.store_failure(failure(1, 7)),
        earlier.get_failures,
        lambda: earlier.delete_failure(ledger_key(1), up_to=7),
    ):
        with pytest.raises(ClientFencedError):
            await call()

    assert await later.get_low_watermark() == 5
    assert await receipts(later) == []
    assert list(await later.get_failures()) == []
    await other.store_low_watermark(7)


@on_each_store
async def test_a_process_may_open_its_store_again(open_store: OpenStore) -> None:
    process = ClientProcess()
    before = await open_store("catalogue", process)
    await before.store_low_watermark(5)
    after = await open_store("catalogue", process)
    assert await after.get_low_watermark() == 5
    with pytest.raises(ClientFencedError):
        await before.store_low_watermark(7)


@on_each_store
async def test_a_process_that_opens_again_does_not_fence_a_later_one(open_store: OpenStore) -> None:
    process = ClientProcess()
    await open_store("catalogue", process)
    later = await open_store("catalogue")
    with pytest.raises(ClientFencedError):
        await open_store("catalogue", process)
    await later.store_low_watermark(7)
