"""Calls of the recovery that are interrupted: by raising listeners, by cancellation, by bugs of a
store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

import pytest

from checkpoints.model import Checkpoint, CheckpointId, CommittedVersion, ledger_key
from checkpoints.receipts import Failure, ReceiptRange, ReceiptStore
from checkpoints.recovery import RecoveryService, RecoverySettings, StoredReceipt
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from ledgers.errors import QuotaError, UnavailableError
from tests.checkpoints.clients import CLIENT, Client, Feed, ledger_of, settle
from tests.checkpoints.stores import receipted
from tests.checkpoints.test_recovery import known_client, known_feed
from tests.memory.feed import MemoryCheckpointSource, MemoryReceiptStore
from tests.memory.store import MemoryStore, MemoryTree
from tests.replication.cluster import in_virtual_time
from tests.virtual_time import run


class SlowStore(MemoryReceiptStore):
    """A store whose writes of watermarks and failures take long. ``error``: raised instead."""

    write_s = 0.0
    error: Exception | None = None

    async def store_low_watermark(self, checkpoint_id: CheckpointId) -> None:
        await self._wait()
        await super().store_low_watermark(checkpoint_id)

    async def store_failure(self, failure: Failure) -> None:
        await super().store_failure(failure)
        await self._wait()

    async def _wait(self) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.sleep(self.write_s)


async def slow_store(feed: Feed) -> SlowStore:
    await feed.receipts.open(CLIENT)
    return SlowStore(feed.receipts.state(CLIENT))


class CommittingSource(MemoryCheckpointSource):
    """``before``, ``after``: called when a request begins, and when its first checkpoint was read;
    one for each request."""

    def __init__(self, source: MemoryCheckpointSource) -> None:
        super().__init__()
        self.__dict__ = source.__dict__
        self.before: deque[Callable[[], Awaitable[object]]] = deque()
        self.after: deque[Callable[[], Awaitable[object]]] = deque()

    async def request_checkpoints(self, earliest_time_ms: int) -> AsyncGenerator[Checkpoint, None]:
        if self.before:
            await self.before.popleft()()
        async with aclosing(super().request_checkpoints(earliest_time_ms)) as checkpoints:
            first = await anext(checkpoints, None)
            if self.after:
                await self.after.popleft()()
            if first is not None:
                yield first
            async for each in checkpoints:
                yield each


@in_virtual_time
async def test_a_wait_ends_with_a_service_whose_store_has_a_bug() -> None:
    feed = await known_feed()
    store = await slow_store(feed)
    waiting: list[asyncio.Future[None]] = []

    async def follow() -> None:
        async with feed.client(store=store) as client:
            await feed.commit(1)
            store.error = ValueError("a bug of the store")
            receipt = client.service.submit_receipt(ledger_key(1), feed.versions[1])
            waiting.append(asyncio.ensure_future(_wait(receipt)))
            await asyncio.sleep(100)

    with pytest.raises(ValueError, match="a bug"):
        await follow()

    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting[0], 60)


@in_virtual_time
async def test_a_wait_ends_with_a_service_that_is_cancelled_while_it_closes() -> None:
    feed = await known_feed()
    store = await slow_store(feed)
    store.write_s = 3.0
    waiting: list[asyncio.Future[None]] = []

    async def follow() -> None:
        async with feed.client(store=store) as client:
            await feed.commit(1)
            receipt = client.service.submit_receipt(ledger_key(1), feed.versions[1])
            waiting.append(asyncio.ensure_future(_wait(receipt)))
            await asyncio.sleep(100)

    following = asyncio.ensure_future(follow())
    for _ in range(2):
        await asyncio.sleep(1)
        following.cancel()
    with suppress(asyncio.CancelledError):
        await following

    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting[0], 60)


async def _wait(receipt: StoredReceipt) -> None:
    await receipt


@in_virtual_time
async def test_a_checkpoint_that_is_committed_while_the_watermark_is_lifted_is_given() -> None:
    feed = Feed()
    feed.source = source = CommittingSource(feed.source)
    await known_client(feed)
    await feed.commit(1)
    await feed.clock.sleep(1000)
    source.before += [settle, lambda: feed.commit(2)]

    async with feed.client(settings=RecoverySettings(recover_back_s=500)) as client:
        lifted = client.result.lifted
        assert lifted is not None
        assert lifted.to_id == 20
        assert client.given | client.missed == {2: feed.versions[2]}


@pytest.mark.parametrize("is_new", [True, False])
@in_virtual_time
async def test_a_listener_that_raises_while_the_client_subscribes_misses_the_rest(
    is_new: bool,
) -> None:
    """Its receipts before count, and the rest is returned by the next call. Nothing is lost."""
    feed = Feed()
    if not is_new:
        await known_client(feed)
    feed.source = source = CommittingSource(feed.source)
    store = await slow_store(feed)
    store.write_s = 3.0

    async def commit() -> None:
        await feed.commit(1, 2, 3)
        await feed.commit(3, 4)

    source.after.append(commit)
    async with RecoveryService.open(source, store, clock=feed.clock) as service:
        client = _Refusing(service, store, refused=2)
        with pytest.raises(OSError, match="disk full"):
            await client.subscribe()
        await feed.clock.sleep(1)  # the receipt of ledger 1 is being written
        await client.subscribe()

        given = client.missed | client.given
        assert given == {each: feed.versions[each] for each in (1, 2, 3, 4)}
        await feed.clock.sleep(10)
        assert service.low_watermark == feed.versions[1] - 1


class _Refusing(Client):
    """Submits a receipt for each ledger at once, and raises at the first sight of one."""

    def __init__(self, service: RecoveryService, store: ReceiptStore, *, refused: int) -> None:
        super().__init__(service, store)
        self._refused: int | None = refused

    async def receive(self, committed: CommittedVersion) -> None:
        if ledger_of(committed) == self._refused:
            self._refused = None
            raise OSError("disk full")
        await super().receive(committed)
        self.service.submit_receipt(committed.key, committed.version)


@in_virtual_time
async def test_a_lift_is_told_although_the_listener_raised_while_the_client_subscribed() -> None:
    feed = await known_feed()
    await feed.commit(1)
    feed.source.delete_up_to(20)
    feed.source = source = CommittingSource(feed.source)
    source.after.append(lambda: feed.commit(2))
    store = await slow_store(feed)
    async with RecoveryService.open(source, store, clock=feed.clock) as service:
        client = _Refusing(service, store, refused=2)
        with pytest.raises(OSError, match="disk full"):
            await client.subscribe()
        await client.subscribe()

        assert client.result.lifted is not None


@in_virtual_time
async def test_a_failure_whose_submission_is_cancelled_is_not_listed() -> None:
    """The object still waits for a receipt, so it has not failed."""
    feed = await known_feed()
    store = await slow_store(feed)
    store.write_s = 5.0
    async with feed.client(store=store) as client:
        await feed.commit(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await client.service.submit_failure(ledger_key(1), feed.versions[1], "odd")
        assert client.service.pending_count == 1
        await client.stored(1, feed.versions[1])

        assert list(client.service.failures()) == []
        assert list(await store.get_failures()) == []


class FullStore(MemoryReceiptStore):
    """A store without room for receipts as long as it has a failure."""

    async def store_checkpoint_range_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        if await self.get_failures():
            raise QuotaError("full")
        await super().store_checkpoint_range_receipts(ranges)


@in_virtual_time
async def test_a_store_that_is_full_gets_room_by_receipts_of_what_failed() -> None:
    feed = await known_feed()
    await feed.receipts.open(CLIENT)
    store = FullStore(feed.receipts.state(CLIENT))
    async with feed.client(store=store) as client:
        for ledger_id in (1, 2, 3):
            await feed.commit(ledger_id)
        await client.service.submit_failure(ledger_key(2), feed.versions[2], "odd")
        client.submit({3: feed.versions[3]})
        await feed.clock.sleep(60)
        assert await receipted(store) == set()

        await client.stored(2, feed.versions[2])

        assert await receipted(store) == set(range(21, 41))
        assert list(await store.get_failures()) == []


def test_a_subscription_may_be_cancelled_at_any_moment() -> None:
    async def subscribe_twice(steps: int, *, is_new: bool) -> bool:
        """Cancel the first call after so many turns of the loop. Return False if it had ended."""
        feed = Feed()
        await feed.commit(0)
        if not is_new:
            await known_client(feed)
            await feed.commit(1, 2)
        feed.source = source = CommittingSource(feed.source)
        store = await slow_store(feed)
        promised = {} if is_new else {1: feed.versions[1], 2: feed.versions[2]}

        async def commit() -> None:
            await feed.commit(2, 3)
            await asyncio.sleep(0)
            await feed.commit(3, 4)

        source.after += [commit, settle]
        async with RecoveryService.open(source, store, clock=feed.clock) as service:
            client = _Slow(service, store)
            subscribing = asyncio.ensure_future(client.subscribe())
            for _ in range(steps):
                await asyncio.sleep(0)
            is_cancelled = subscribing.cancel()
            await asyncio.gather(subscribing, return_exceptions=True)
            first_id, told = source.last_id, client.missed
            await client.subscribe()
            await feed.commit(5)
            await settle()

            for given in (client.missed, client.given):
                told |= {i: max(version, told.get(i, 0)) for i, version in given.items()}
            promised |= {i: version for i, version in feed.versions.items() if version > first_id}
            for ledger_id, version in promised.items():
                assert told.get(ledger_id, 0) >= version, (steps, ledger_id)
            if not is_new:
                assert told | {0: feed.versions[0]} == feed.versions, steps
        return is_cancelled

    for is_new in (False, True):
        steps = 0
        while run(subscribe_twice(steps, is_new=is_new)):
            steps += 1
        assert steps > 5


@in_virtual_time
async def test_the_source_waits_while_a_client_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few changes are kept in memory, and the listener gets all of them in their order."""
    monkeypatch.setattr("checkpoints.recovery.ARRIVED_MAX", 4)
    feed = await known_feed()
    feed.source = source = CommittingSource(feed.source)
    store = await slow_store(feed)
    committed: list[int] = []

    async def commit() -> None:
        for ledger_id in range(1, 20, 2):
            await feed.commit(ledger_id, ledger_id + 1)
            committed.append(ledger_id)

    async with (
        asyncio.TaskGroup() as tasks,
        RecoveryService.open(source, store, clock=feed.clock) as service,
    ):

        async def begin() -> None:
            tasks.create_task(commit())
            await settle()
            assert committed == [1, 3]

        source.after.append(begin)
        client = _Slow(service, store)
        await client.subscribe()
        await settle()

        assert [ledger_of(each) for each in client.events] == list(range(1, 21))


class _Slow(Client):
    async def receive(self, committed: CommittedVersion) -> None:
        await asyncio.sleep(0)
        await super().receive(committed)


@pytest.mark.parametrize("step_count", range(8))
@in_virtual_time
async def test_a_failure_may_be_cancelled_at_any_moment(step_count: int) -> None:
    """Then the object is either offered again or listed as failed, also after a restart."""
    feed = await known_feed()
    async with feed.client() as client:
        await feed.commit(1)
        key, version = ledger_key(1), feed.versions[1]
        failing = asyncio.ensure_future(client.service.submit_failure(key, version, "odd"))
        for _ in range(step_count):
            await asyncio.sleep(0)
        failing.cancel()
        await settle()
        is_listed = bool(client.service.failures())
        assert is_listed is (client.service.pending_count == 0)
    async with feed.client() as client:
        assert bool(client.missed) is not is_listed
        assert bool(client.service.failures()) is is_listed


@in_virtual_time
async def test_a_reason_that_no_store_can_write_is_cleaned() -> None:
    """For example of an error that names a file whose name is not UTF-8."""
    feed = Feed()
    tree = MemoryTree()
    store = await ZooKeeperReceiptStore.open(MemoryStore(tree), folder="/c", client=CLIENT)
    async with feed.client(store=store) as client:
        await feed.commit(1)
        await client.service.submit_failure(ledger_key(1), feed.versions[1], "bad \udcff name")

        (failure,) = await store.get_failures()
        assert failure.because == "bad ? name"
