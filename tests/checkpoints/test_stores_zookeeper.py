"""What only ZooKeeper does: one record by compare-and-set, of limited size."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from checkpoints.receipts import ReceiptRange
from checkpoints.stores.zookeeper import (
    RECORD_BYTES_MAX,
    ZooKeeperReceiptStore,
    client_path,
    decode_client,
)
from ledgers.errors import (
    ClientFencedError,
    CorruptionError,
    QuotaError,
    SettingsError,
    UnavailableError,
)
from ledgers.store import Operation
from tests.checkpoints.stores import receipts
from tests.ledgers.given import Act, given_by
from tests.memory.store import Fault, MemoryStore, MemoryTree

FOLDER = "/clients"


def play(act: Act, _: object) -> None:
    async def main() -> None:
        tree = MemoryTree()
        session = MemoryStore(tree)
        store = await ZooKeeperReceiptStore.open(session, folder=FOLDER, client="catalogue")
        await act(tree, session, store)

    asyncio.run(main())


on_store = given_by(play, count=3)


@on_store
async def test_the_record_is_compact_json(
    tree: MemoryTree, session: MemoryStore, store: ZooKeeperReceiptStore
) -> None:
    await store.store_low_watermark(10)
    await store.store_checkpoint_range_receipts([ReceiptRange(21, 30), ReceiptRange(31, 40)])

    data = tree.snapshot()[f"{FOLDER}/catalogue"]
    record = decode_client(data, path="")
    assert data == (
        b'{"format":1,"epoch":%d,"process":"%s","generation":0,"was_reset":false,'
        b'"low_watermark":10,"receipts":[[21,40]],"failures":[],"log":null}'
        % (record.epoch, record.process.encode())
    )


@on_store
async def test_a_record_that_would_be_too_large_is_written_when_receipts_merge(
    tree: MemoryTree, session: MemoryStore, store: ZooKeeperReceiptStore
) -> None:
    first = 1 << 40
    apart = [ReceiptRange(first + each, first + each) for each in range(0, 60_000, 2)]
    await store.store_checkpoint_range_receipts(apart[:100])
    with pytest.raises(QuotaError):
        await store.store_checkpoint_range_receipts(apart)
    assert len(await receipts(store)) == 100
    assert len(tree.snapshot()[f"{FOLDER}/catalogue"]) < RECORD_BYTES_MAX

    between = [ReceiptRange(first + each, first + each) for each in range(1, 60_000, 2)]
    await store.store_checkpoint_range_receipts([*apart, *between])

    assert await receipts(store) == [(first, first + 59_999)]


@on_store
async def test_a_write_whose_reply_was_lost_can_be_repeated(
    tree: MemoryTree, session: MemoryStore, store: ZooKeeperReceiptStore
) -> None:
    def lose_one(_: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        if not operations:
            return None
        tree.faults = None
        return Fault.LOST_REPLY

    tree.faults = lose_one
    with pytest.raises(UnavailableError):
        await store.store_low_watermark(10)
    tree.resume(session)
    await store.store_low_watermark(10)
    await store.store_low_watermark(11)

    assert await store.get_low_watermark() == 11


@on_store
async def test_two_processes_may_write_at_the_same_time_until_one_is_fenced(
    tree: MemoryTree, session: MemoryStore, store: ZooKeeperReceiptStore
) -> None:
    async def write_on() -> None:
        for watermark in itertools.count(1):
            await store.store_low_watermark(watermark)

    writing = asyncio.ensure_future(write_on())
    await asyncio.sleep(0.001)
    later = await ZooKeeperReceiptStore.open(session, folder=FOLDER, client="catalogue")
    reached = await later.get_low_watermark()
    with pytest.raises(ClientFencedError):
        await writing

    assert await later.get_low_watermark() == reached


@on_store
async def test_a_deleted_client_cannot_go_on(
    tree: MemoryTree, session: MemoryStore, store: ZooKeeperReceiptStore
) -> None:
    await session.delete(f"{FOLDER}/catalogue")

    with pytest.raises(ClientFencedError):
        await store.store_low_watermark(10)


@pytest.mark.parametrize("client", ["", ".", ".."])
def test_names_that_are_no_znodes_are_refused(client: str) -> None:
    with pytest.raises(SettingsError):
        client_path(FOLDER, client)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"epoch":"a"}', b'{"format":2,"epoch":1}', b'{"later":' + b"[" * 100_000]
)
def test_an_unreadable_record_is_reported(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="path=/clients/a"):
        decode_client(data, path="/clients/a")
