"""The promises of the recovery to its clients, numbered as in ``recovery``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest

from checkpoints.errors import PositionUnknownError
from checkpoints.model import Checkpoint, CommittedVersion, ledger_key, only_ledgers
from checkpoints.receipts import ReceiptRange, ReceiptStore
from checkpoints.recovery import LiftReason, RecoveryService, RecoverySettings, StoredReceipt
from ledgers.errors import ClientFencedError, CorruptionError, NotSharedError, UnavailableError
from tests.checkpoints.clients import CLIENT, Client, Feed, ledger_of, settle
from tests.checkpoints.stores import receipts
from tests.memory.feed import MemoryReceiptStore
from tests.replication.cluster import in_virtual_time


async def is_stored(receipt: StoredReceipt, *, within_s: float = 1.0) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await receipt
    except TimeoutError:
        return False
    return True


async def known_feed() -> Feed:
    """Return a feed that knows the client: it has a receipt for the first checkpoint, of ledger
    0."""
    feed = Feed()
    await known_client(feed)
    return feed


async def known_client(feed: Feed) -> None:
    """Make the client known: it has a receipt for the first checkpoint, of ledger 0."""
    async with feed.client() as client:
        await feed.commit(0)
        await client.stored(0, feed.versions[0])


# --- Lost checkpoints ---------------------------------------------------------------------------


@in_virtual_time
async def test_changes_before_a_gap_in_the_log_may_be_missed() -> None:
    feed = await known_feed()
    lost = await feed.commit(1)
    await feed.commit(2)
    feed.source._checkpoints.remove(lost)

    async with feed.client(settings=RecoverySettings(recover_back_s=math.inf)) as client:
        assert client.missed == {2: feed.versions[2]}
        assert client.result.lifted is not None
        assert client.result.lifted.because is LiftReason.RETENTION
        assert client.result.lifted.to_id == lost.id


# --- 1. Receipts ----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_receipt_is_stored_when_every_object_of_its_checkpoint_has_one() -> None:
    feed = Feed()
    async with feed.client() as client:
        await feed.commit(1, 2)

        first = client.service.submit_receipt(ledger_key(1), feed.versions[1])
        assert not await is_stored(first)
        assert await client.store.get_low_watermark() == 0

        second = client.service.submit_receipt(ledger_key(2), feed.versions[2])
        assert await is_stored(second)
        assert await is_stored(first)
        assert await client.store.get_low_watermark() == 10


@in_virtual_time
async def test_a_version_that_was_not_yet_shared_is_refused() -> None:
    feed = Feed()
    async with feed.client() as client:
        with pytest.raises(NotSharedError):
            client.submit({1: 1})
        await feed.commit(1, 2)

        with pytest.raises(NotSharedError):
            client.submit({1: feed.versions[1] + 1})
        with pytest.raises(NotSharedError):
            client.submit({3: 11})
        with pytest.raises(NotSharedError):
            await client.service.submit_failure(ledger_key(1), 11, "no space")

        assert await client.store.get_low_watermark() is None


@in_virtual_time
async def test_a_cancelled_wait_for_a_receipt_ends_no_other() -> None:
    feed = Feed()
    async with feed.client() as client:
        await feed.commit(1, 2)
        receipt = client.service.submit_receipt(ledger_key(1), feed.versions[1])
        waiting = asyncio.ensure_future(is_stored(receipt, within_s=100))
        assert not await is_stored(receipt)

        client.submit({2: feed.versions[2]})

        assert await waiting


# --- 3. No gap at the seam ------------------------------------------------------------------------


@in_virtual_time
async def test_missed_objects_come_once_at_their_latest_version_oldest_first() -> None:
    feed = await known_feed()
    for ledger_ids in ((1, 2), (2, 3), (3, 4), (1,)):
        await feed.commit(*ledger_ids)

    async with feed.client() as client:
        assert client.missed == {each: feed.versions[each] for each in (1, 2, 3, 4)}
        assert next(iter(client.missed)) == 2
        assert list(client.missed)[-1] == 1
        assert client.events == []
        assert not client.result.is_new


@in_virtual_time
async def test_a_missed_object_that_changes_before_it_is_taken_is_given_once() -> None:
    feed = await known_feed()
    await feed.commit(1, 2)
    store = await feed.receipts.open(CLIENT)
    async with _open(feed, store) as service:
        client = Client(service, store)
        missed = await service.subscribe(client)
        assert len(missed) == 2
        await feed.commit(1)
        service.submit_receipt(ledger_key(2), feed.versions[2])

        assert list(missed) == []
        assert client.given == {1: feed.versions[1]}


@in_virtual_time
async def test_an_interrupted_subscription_is_repeated() -> None:
    feed = await known_feed()
    await feed.commit(1)
    store = _Failing(await feed.receipts.open(CLIENT))
    async with _open(feed, cast(ReceiptStore, store)) as service:
        client = Client(service, cast(ReceiptStore, store))
        for failing in ("get_low_watermark", "get_failures", "get_checkpoint_range_receipts"):
            store.failing = failing
            with pytest.raises(UnavailableError):
                await client.subscribe()
        store.failing = ""
        await client.subscribe()
        await feed.commit(2)

        assert client.missed == {1: feed.versions[1]}
        assert client.given == {2: feed.versions[2]}


# --- 4. New clients and the bound -----------------------------------------------------------------


@in_virtual_time
async def test_a_client_without_any_receipt_is_new_and_missed_nothing() -> None:
    feed = Feed()
    await feed.commit(1)
    async with feed.client() as client:
        assert client.result.is_new
        assert client.missed == {}
        await feed.commit(2)
        assert client.given == {2: feed.versions[2]}

    async with feed.client() as client:  # it was given something, but submitted no receipt
        assert client.result.is_new
        assert client.missed == {}


@in_virtual_time
async def test_a_client_recovers_from_its_first_receipt_on() -> None:
    feed = Feed()
    async with feed.client() as client:
        await feed.commit(1)
        await feed.commit(2)
        await client.stored(2, feed.versions[2])

    async with feed.client() as client:
        assert not client.result.is_new
        assert client.missed == {1: feed.versions[1]}


@in_virtual_time
async def test_what_is_left_out_is_no_first_receipt() -> None:
    feed = Feed()
    async with feed.client(wanted=only_ledgers({1})) as client:
        await feed.commit(2)
        await settle()
        assert await client.store.get_low_watermark() is None


@in_virtual_time
async def test_an_older_watermark_is_lifted_to_the_bound_and_the_client_is_told() -> None:
    feed = await known_feed()
    await feed.commit(1)
    await feed.clock.sleep(1000)
    await feed.commit(2)

    async with feed.client(settings=RecoverySettings(recover_back_s=500)) as client:
        lifted = client.result.lifted
        assert client.missed == {2: feed.versions[2]}
        assert lifted is not None
        assert (lifted.from_id, lifted.to_id) == (10, 20)
        assert lifted.because is LiftReason.BOUND
        await client.stored(2, feed.versions[2])
        assert await client.store.get_low_watermark() == 30


@in_virtual_time
async def test_a_client_that_dies_before_its_next_receipt_is_told_of_the_lift_again() -> None:
    feed = await known_feed()
    await feed.commit(1)
    await feed.commit(2)
    feed.source.delete_up_to(20)

    for _ in range(2):
        async with feed.client(settings=RecoverySettings(recover_back_s=math.inf)) as client:
            assert client.result.lifted is not None
            await settle()
            assert await client.store.get_low_watermark() == 10

    async with feed.client(settings=RecoverySettings(recover_back_s=math.inf)) as client:
        await client.stored(2, feed.versions[2])
    async with feed.client(settings=RecoverySettings(recover_back_s=math.inf)) as client:
        assert client.result.lifted is None


@in_virtual_time
async def test_a_bound_younger_than_every_checkpoint_lifts_to_the_last() -> None:
    feed = await known_feed()
    await feed.commit(1)
    await feed.clock.sleep(1000)

    async with feed.client(settings=RecoverySettings(recover_back_s=500)) as client:
        assert client.missed == {}
        assert client.result.lifted is not None
        assert client.result.lifted.to_id == 20
        await feed.commit(2)
        assert client.given == {2: feed.versions[2]}
        await client.stored(2, feed.versions[2])
        assert await client.store.get_low_watermark() == 30


@in_virtual_time
async def test_a_client_without_changes_beyond_the_bound_is_told_nothing() -> None:
    feed = await known_feed()
    await feed.clock.sleep(1000)

    async with feed.client(settings=RecoverySettings(recover_back_s=500)) as client:
        assert client.result.lifted is None


@pytest.mark.parametrize("deleted_up_to", [20, 30])
@in_virtual_time
async def test_retention_lifts_the_watermark_too(deleted_up_to: int) -> None:
    feed = await known_feed()
    await feed.commit(1)
    await feed.commit(2)
    feed.source.delete_up_to(deleted_up_to)

    async with feed.client(settings=RecoverySettings(recover_back_s=math.inf)) as client:
        assert client.result.lifted is not None
        assert client.result.lifted.because is LiftReason.RETENTION
        assert client.result.lifted.to_id == deleted_up_to
        assert client.missed == ({2: feed.versions[2]} if deleted_up_to == 20 else {})


@in_virtual_time
async def test_receipts_of_what_was_deleted_need_no_lift() -> None:
    feed = await known_feed()
    async with feed.client() as client:
        await feed.commit(1)
        await feed.commit(2)
        await client.stored(1, feed.versions[1])
    feed.source.delete_up_to(20)

    async with feed.client() as client:
        assert client.result.lifted is None
        assert client.missed == {2: feed.versions[2]}


@in_virtual_time
async def test_a_caller_may_choose_the_checkpoint_where_a_new_client_begins() -> None:
    feed = Feed()
    for ledger_id in (1, 2, 3):
        await feed.commit(ledger_id)
    store = await feed.receipts.open(CLIENT)
    await store.store_low_watermark(10)

    async with feed.client() as client:
        assert client.missed == {2: 11, 3: 21}


# --- 5. What is being worked on -------------------------------------------------------------------


@in_virtual_time
async def test_checkpoints_of_the_last_seconds_are_not_called_missed() -> None:
    feed = Feed()
    async with feed.client(settings=RecoverySettings(being_worked_on_s=5)) as client:
        await feed.commit(1)
        await feed.clock.sleep(3)
        await feed.commit(2)

        await client.subscribe()
        assert client.missed == {}
        await feed.clock.sleep(3)
        await client.subscribe()
        assert client.missed == {1: feed.versions[1]}
        await feed.clock.sleep(3)
        await client.subscribe()
        assert client.missed == {2: feed.versions[2]}


@in_virtual_time
async def test_what_was_missed_and_not_yet_taken_stays_missed() -> None:
    feed = await known_feed()
    await feed.commit(1, 2)
    async with _open(feed) as service:
        client = Client(service, await feed.receipts.open("other"))
        taken = [ledger_of(next(iter(await service.subscribe(client))))]

        await client.subscribe()

        assert sorted([*taken, *client.missed]) == [1, 2]


# --- 6. At least once: see also test_recovery_faults and test_recovery_random ---------------------


@in_virtual_time
async def test_a_listener_that_raises_has_missed_the_object() -> None:
    feed = await known_feed()
    async with feed.client() as client:

        async def refuse(committed: CommittedVersion) -> None:
            raise OSError("disk full")

        client.receive = refuse  # type: ignore[method-assign]
        with pytest.raises(OSError, match="disk full"):
            await feed.commit(1)
        await feed.clock.sleep(6)
        await client.subscribe()

        assert client.missed == {1: feed.versions[1]}


@in_virtual_time
async def test_a_gap_in_the_feed_ends_the_service() -> None:
    feed = await known_feed()

    async def follow() -> None:
        async with feed.client() as client:
            await client.service.receive_checkpoint(
                Checkpoint(id=40, previous_id=30, time_ms=0, spans=())
            )
            await asyncio.sleep(100)

    with pytest.raises(CorruptionError, match="does not follow"):
        await follow()


# --- 11. Receipts for checkpoints that the log does not have --------------------------------------


@in_virtual_time
async def test_a_client_whose_receipts_end_within_a_checkpoint_begins_again() -> None:
    feed = Feed()
    await feed.commit(1)
    store = await feed.receipts.open(CLIENT)
    await store.store_low_watermark(5)
    await store.store_checkpoint_range_receipts([ReceiptRange(8, 9)])

    with pytest.raises(PositionUnknownError):
        async with feed.client(store=store):
            raise AssertionError

    assert await receipts(store) == []
    async with feed.client() as client:
        assert client.result.is_new


@in_virtual_time
async def test_a_client_that_was_beyond_the_end_of_the_log_is_not_left_so_in_silence() -> None:
    feed = Feed()
    store = await feed.receipts.open(CLIENT)
    await store.store_low_watermark(5)

    async def follow() -> None:
        async with feed.client():
            await feed.commit(1)
            await asyncio.sleep(100)

    with pytest.raises(CorruptionError, match="does not follow"):
        await follow()
    with pytest.raises(PositionUnknownError):
        await follow()
    async with feed.client() as client:
        assert client.result.is_new


# --- 7. Merging -----------------------------------------------------------------------------------


@in_virtual_time
async def test_compaction_runs_from_time_to_time() -> None:
    feed = Feed()
    settings = RecoverySettings(compaction_interval_s=60)
    async with feed.client(settings=settings) as client:
        for ledger_id in range(100):
            await feed.commit(ledger_id)
        for ledger_id in [*range(3, 100, 2), *range(4, 100, 2)]:
            await client.stored(ledger_id, feed.versions[ledger_id])
        assert len(feed.receipts.state(CLIENT).end_by_begin) > 40

        await feed.clock.sleep(61)

        assert await receipts(client.store) == [(31, 1000)]
        client.submit({each: feed.versions[each] for each in range(3)})
        await feed.clock.sleep(61)
        assert await client.store.get_low_watermark() == 1000


@in_virtual_time
async def test_overlapping_receipts_in_the_store_are_merged() -> None:
    feed = await known_feed()
    for ledger_id in range(1, 9):
        await feed.commit(ledger_id)
    store = await feed.receipts.open(CLIENT)
    await store.store_checkpoint_range_receipts(
        [ReceiptRange(21, 40), ReceiptRange(31, 60), ReceiptRange(31, 50)]
    )

    async with feed.client() as client:
        assert sorted(client.missed) == [1, 6, 7, 8]
        await client.stored(1, feed.versions[1])
        assert await client.store.get_low_watermark() == 60


# --- 8. Filters -----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_filtered_view_acknowledges_what_it_leaves_out() -> None:
    feed = Feed()
    wanted = only_ledgers(range(10, 20))
    async with feed.client(wanted=wanted) as client:
        await feed.commit(1, 10, 20)
        await feed.commit(1, 2)
        assert client.given == {10: feed.versions[10]}
        await client.stored(10, feed.versions[10])
        assert await client.store.get_low_watermark() == 20

    await feed.commit(3)
    await feed.commit(4, 11)
    async with feed.client(wanted=wanted) as client:
        assert client.missed == {11: feed.versions[11]}
        await client.stored(11, feed.versions[11])
        assert await client.store.get_low_watermark() == 40


# --- 9. Negative receipts -------------------------------------------------------------------------


@in_virtual_time
async def test_failures_are_offered_again_on_request() -> None:
    feed = Feed()
    async with feed.client() as client:
        await feed.commit(1, 2, deleted=frozenset({2}))
        for ledger_id in (1, 2):
            await client.service.submit_failure(
                ledger_key(ledger_id), feed.versions[ledger_id], "no space"
            )

    async with feed.client() as client:
        assert await client.service.retry_failures() == 2
        assert client.given == {1: feed.versions[1], 2: feed.versions[2]}
        assert [each.is_deleted for each in client.events] == [False, True]
        await client.stored(1, feed.versions[1])
        await client.service.submit_failure(ledger_key(2), feed.versions[2], "still no space")

        assert [each.key for each in await client.store.get_failures()] == [ledger_key(2)]
        assert [each.because for each in client.service.failures()] == ["still no space"]


@in_virtual_time
async def test_the_low_watermark_never_passes_what_lacks_a_receipt() -> None:
    feed = Feed()
    async with feed.client() as client:
        for ledger_id in range(5):
            await feed.commit(ledger_id)
        watermarks = []
        for ledger_id in (4, 2, 1, 0, 3):
            client.submit({ledger_id: feed.versions[ledger_id]})
            await settle()
            watermarks.append(await client.store.get_low_watermark())

        assert watermarks == [0, 0, 0, 30, 50]


@in_virtual_time
async def test_what_a_later_receipt_subsumes_is_not_missed() -> None:
    feed = Feed()
    await known_client(feed)
    async with feed.client() as client:
        await feed.commit(1, 2)
        await feed.commit(1)
        await client.stored(1, feed.versions[1])

    async with feed.client() as client:
        assert client.missed == {2: feed.versions[2]}


@in_virtual_time
async def test_a_failure_does_not_stop_the_rest() -> None:
    feed = Feed()
    async with feed.client() as client:
        await feed.commit(1, 2)
        await feed.commit(3)
        client.submit({2: feed.versions[2]})

        await client.service.submit_failure(ledger_key(1), feed.versions[1], "no space")
        await client.stored(3, feed.versions[3])

        assert await client.store.get_low_watermark() == 20
        (failure,) = client.service.failures()
        assert (failure.key, failure.version) == (ledger_key(1), feed.versions[1])
        assert failure.because == "no space"

    async with feed.client() as client:
        assert client.missed == {}
        assert len(client.service.failures()) == 1


@in_virtual_time
async def test_a_failure_whose_checkpoint_is_open_is_not_missed() -> None:
    feed = Feed()
    async with feed.client() as client:
        await feed.commit(1, 2)
        await client.service.submit_failure(ledger_key(1), feed.versions[1], "no space")

    async with feed.client() as client:
        assert client.missed == {2: feed.versions[2]}


@in_virtual_time
async def test_a_later_version_is_given_although_an_earlier_one_failed() -> None:
    feed = Feed()
    async with feed.client() as client:
        await feed.commit(1)
        await client.service.submit_failure(ledger_key(1), feed.versions[1], "no space")
        await feed.commit(1)

        assert client.given == {1: feed.versions[1]}
        assert await client.service.retry_failures() == 0
        await client.stored(1, feed.versions[1])
        assert list(client.service.failures()) == []
        assert list(await client.store.get_failures()) == []


@in_virtual_time
async def test_a_long_reason_is_cut() -> None:
    feed = Feed()
    async with feed.client() as client:
        await feed.commit(1)
        await client.service.submit_failure(ledger_key(1), feed.versions[1], "x" * 5_000)

        assert len(client.service.failures()[0].because) == 1_000


# --- 10. One process for each client --------------------------------------------------------------


@in_virtual_time
async def test_the_later_of_two_processes_fences_the_earlier() -> None:
    feed = await known_feed()
    clients: list[Client] = []

    async def follow_later() -> None:
        async with feed.client() as later:
            clients.append(later)
            await feed.commit(1)
            await later.stored(1, feed.versions[1])

    async def follow() -> None:
        async with feed.client() as earlier:
            clients.append(earlier)
            await follow_later()
            await earlier.stored(1, feed.versions[1])

    with pytest.raises(ClientFencedError):
        await follow()
    earlier, later = clients
    with pytest.raises(ClientFencedError):
        earlier.submit({1: feed.versions[1]})
    assert later.given == {1: feed.versions[1]}


# --- The end of a service -------------------------------------------------------------------------


@in_virtual_time
async def test_complete_receipts_are_written_at_the_end() -> None:
    feed = Feed()
    store = await feed.receipts.open(CLIENT)
    async with feed.client(store=store) as client:
        await feed.commit(1)
        client.submit({1: feed.versions[1]})

    assert await store.get_low_watermark() == 10
    await feed.commit(2)
    assert client.given == {1: feed.versions[1]}


def _open(
    feed: Feed, store: ReceiptStore | None = None
) -> AbstractAsyncContextManager[RecoveryService]:
    """Open a service that has not subscribed."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[RecoveryService]:
        used = store or await feed.receipts.open(CLIENT)
        async with RecoveryService.open(feed.source, used, clock=feed.clock) as service:
            yield service

    return opened()


class _Failing:
    """A store of which one method fails."""

    def __init__(self, store: MemoryReceiptStore) -> None:
        self._store = store
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        if name != self.failing:
            return getattr(self._store, name)
        if name == "get_checkpoint_range_receipts":
            return self._no_receipts
        return self._no_answer

    async def _no_answer(self, *_: object) -> None:
        raise UnavailableError("no answer")

    async def _no_receipts(self, _: int) -> AsyncGenerator[ReceiptRange, None]:
        raise UnavailableError("no answer")
        yield
