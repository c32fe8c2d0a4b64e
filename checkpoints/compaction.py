"""Merges the stored receipts of a client, so that the size of the store stays constant.

Receipts are stored as they complete, so neighbours may be separate rows. Compaction first writes
each merged receipt, then deletes the rows that it contains. If it is interrupted between the two,
receipts overlap, which is harmless.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial

from checkpoints.receipts import RangeMerger, ReceiptRange, ReceiptStore

_RANGES_AT_ONCE = 1_000

Write = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]


async def _plainly(call: Callable[[], Awaitable[None]]) -> None:
    await call()


async def compact(store: ReceiptStore, *, write: Write = _plainly) -> None:
    """Merge the receipts of the client, and delete those that the low watermark covers.

    May run while receipts are stored. ``write`` makes the writing calls. Raises UnavailableError:
    call again later.
    """
    low_watermark = await store.get_low_watermark()
    if low_watermark is None:
        return
    await write(lambda: store.purge_checkpoint_receipts([ReceiptRange(0, low_watermark)]))
    merger = RangeMerger()
    async with aclosing(store.get_checkpoint_range_receipts(low_watermark)) as rows:
        async for row in rows:
            merger.add(row)
    merged = merger.joined
    for start in range(0, len(merged), _RANGES_AT_ONCE):
        part = merged[start : start + _RANGES_AT_ONCE]
        await write(partial(store.store_checkpoint_range_receipts, part))
        await write(partial(store.purge_checkpoint_receipts, part))
