"""At least once, never less: the store fails at every call in turn, and the client dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from checkpoints.model import ledger_key
from checkpoints.receipts import Failure, ReceiptRange
from checkpoints.recovery import RecoverySettings
from ledgers.errors import UnavailableError
from tests.checkpoints.clients import CLIENT, Feed, settle
from tests.checkpoints.faulty_store import FaultyStore, StoreFault
from tests.memory.feed import MemoryReceiptStore
from tests.replication.cluster import in_virtual_time
from tests.virtual_time import run

SETTINGS = RecoverySettings(compaction_interval_s=20)


class _Once:
    """One fault, at the call of this number."""

    def __init__(self, fault: StoreFault, number: int) -> None:
        self._fault, self._left = fault, number

    @property
    def has_happened(self) -> bool:
        return self._left < 0

    def __call__(self) -> StoreFault | None:
        self._left -= 1
        return self._fault if self._left == -1 else None


async def _first_life(feed: Feed, store: FaultyStore, done: dict[int, int]) -> None:
    """Follow, work in odd order, fail once, and stop with work left."""
    async with feed.client(store=store, settings=SETTINGS) as client:
        for ledger_ids in ((1, 2), (3,), (4, 1), (5,), (6,)):
            await feed.commit(*ledger_ids)
        for ledger_id in (6, 3, 5):
            done[ledger_id] = feed.versions[ledger_id]
            await client.stored(ledger_id, done[ledger_id])
        await client.service.submit_failure(ledger_key(4), feed.versions[4], "no space")
        await feed.clock.sleep(50)  # compaction
        done[1] = feed.versions[1]
        client.submit({1: done[1]})
        await feed.clock.sleep(50)


async def _second_life(feed: Feed, store: FaultyStore, done: dict[int, int]) -> None:
    """Recover: everything without a receipt is offered, once. Then retry the failure."""
    async with feed.client(store=store, settings=SETTINGS) as client:
        failed = {each.key for each in client.service.failures()}
        missing = {key for key, version in feed.versions.items() if done.get(key) != version}
        assert missing - {4} <= set(client.missed)
        assert 4 in client.missed or ledger_key(4) in failed
        for ledger_id, version in client.missed.items():
            assert version == feed.versions[ledger_id]
            done[ledger_id] = version
            client.submit({ledger_id: version})
        await client.service.retry_failures()
        for ledger_id, version in client.given.items():
            done[ledger_id] = version
            await client.stored(ledger_id, version)
        await feed.clock.sleep(50)


@pytest.mark.parametrize("fault", StoreFault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("life", [1, 2])
def test_the_store_fails_at_every_call_in_turn(fault: StoreFault, life: int) -> None:
    async def main(number: int) -> bool:
        feed, once, done = Feed(), _Once(fault, number), dict[int, int]()

        async def opened(is_faulty: bool) -> FaultyStore:
            store = await feed.receipts.open(CLIENT)
            return FaultyStore(store, clock=feed.clock, fault=once if is_faulty else lambda: None)

        first = await opened(life == 1)
        while True:
            try:
                await _first_life(feed, first, done)
                break
            except UnavailableError:  # of subscribe, before anything else happened
                assert not feed.versions
        second = await opened(life == 2)
        while True:
            try:
                await _second_life(feed, second, done)
                break
            except UnavailableError:
                continue
        for store in (first, second):
            await store.settle_late()

        assert done == feed.versions
        last = await opened(False)
        assert await last.get_low_watermark() == feed.source.last_id
        assert list(await last.get_failures()) == []
        async with feed.client(store=last) as client:
            assert client.missed == {}
        return once.has_happened

    number = 0
    while run(main(number)):
        number += 1
    assert number > 5


@pytest.mark.parametrize("calls", range(12))
@in_virtual_time
async def test_the_client_dies_at_every_call_of_the_store(calls: int) -> None:
    """Also between its work and the receipt: what was not stored is offered again."""
    feed, done = Feed(), dict[int, int]()

    def count() -> None:
        store.is_dead = store.call_count > calls

    store = FaultyStore(await feed.receipts.open(CLIENT), clock=feed.clock, fault=count)
    life = asyncio.ensure_future(_first_life(feed, store, done))
    await asyncio.wait([life], timeout=400)
    life.cancel()
    await asyncio.wait([life])

    after = await feed.receipts.open(CLIENT)
    watermark = await after.get_low_watermark()
    async with feed.client(store=after) as client:
        failed = {each.key for each in client.service.failures()}
        if watermark is None:
            assert client.result.is_new
            return
        assert client.service.low_watermark is not None
        for ledger_id, version in feed.versions.items():
            is_failed = ledger_key(ledger_id) in failed
            if done.get(ledger_id) != version and not is_failed:
                assert client.missed[ledger_id] == version


@in_virtual_time
async def test_a_store_that_is_down_for_long_delays_receipts_and_nothing_else() -> None:
    feed = Feed()
    is_down = False

    def fault() -> StoreFault | None:
        return StoreFault.BEFORE if is_down else None

    store = FaultyStore(await feed.receipts.open(CLIENT), clock=feed.clock, fault=fault)
    async with feed.client(store=store) as client:
        await feed.commit(0)
        await client.stored(0, feed.versions[0])
        is_down = True
        for ledger_id in range(100):
            await feed.commit(ledger_id)
            client.submit({ledger_id: feed.versions[ledger_id]})
        receipt = client.service.submit_receipt(ledger_key(7), feed.versions[7])
        await feed.clock.sleep(300)
        calls_while_down = store.call_count
        is_down = False
        await receipt

        assert calls_while_down < 50  # it waits longer and longer
        assert await store.get_low_watermark() == feed.source.last_id


# --- Calls that overlap ---------------------------------------------------------------------------


class _Gated(MemoryReceiptStore):
    """A store whose writes of one kind wait for a gate, once."""

    def __init__(self, store: MemoryReceiptStore) -> None:
        self.__dict__.update(store.__dict__)
        self.waiting_for = ""
        self.gate = asyncio.Event()

    async def _pass(self, name: str) -> None:
        if name == self.waiting_for:
            self.waiting_for = ""
            await self.gate.wait()

    async def store_low_watermark(self, checkpoint_id: int) -> None:
        await self._pass("watermark")
        await super().store_low_watermark(checkpoint_id)

    async def store_checkpoint_range_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        await self._pass("receipts")
        await super().store_checkpoint_range_receipts(ranges)

    async def store_failure(self, failure: Failure) -> None:
        await self._pass("failure")
        await super().store_failure(failure)


@in_virtual_time
async def test_the_receipt_of_a_failure_is_stored_after_the_failure() -> None:
    """Otherwise a death between the two would lose the object."""
    feed = Feed()
    store = _Gated(await feed.receipts.open(CLIENT))
    async with feed.client(store=store) as client:
        await feed.commit(0)
        await client.stored(0, feed.versions[0])
        await feed.commit(1)
        store.waiting_for = "failure"
        failing = asyncio.ensure_future(
            client.service.submit_failure(ledger_key(1), feed.versions[1], "no space")
        )
        await settle()
        assert client.service.low_watermark == 10
        store.gate.set()
        await failing
        await settle()
        assert await store.get_low_watermark() == 20


@in_virtual_time
async def test_a_receipt_that_is_extended_while_it_is_written_is_written_again() -> None:
    feed = Feed()
    store = _Gated(await feed.receipts.open(CLIENT))
    async with feed.client(store=store) as client:
        for ledger_id in range(4):
            await feed.commit(ledger_id)
        await client.stored(0, feed.versions[0])
        store.waiting_for = "receipts"
        first = client.service.submit_receipt(ledger_key(2), feed.versions[2])
        await settle()
        second = client.service.submit_receipt(ledger_key(3), feed.versions[3])
        store.gate.set()

        await first
        await second

        assert feed.receipts.state(CLIENT).end_by_begin == {21: 40}


@in_virtual_time
async def test_an_object_that_fails_again_while_its_failure_is_deleted_stays_failed() -> None:
    feed = Feed()
    store = _Gated(await feed.receipts.open(CLIENT))
    async with feed.client(store=store) as client:
        await feed.commit(1)
        await feed.commit(2)
        await client.service.submit_failure(ledger_key(1), feed.versions[1], "first")
        await settle()
        store.waiting_for = "watermark"
        client.submit({1: feed.versions[1], 2: feed.versions[2]})
        await settle()
        failing = asyncio.ensure_future(
            client.service.submit_failure(ledger_key(1), feed.versions[1], "second")
        )
        await settle()
        store.gate.set()
        await failing
        await settle()

        assert [each.because for each in await store.get_failures()] == ["second"]
        assert [each.because for each in client.service.failures()] == ["second"]
