"""Measures the client's side of the change feed: ``python -m bench.feed_receipts``.

No cluster is needed: a source that makes checkpoints on the way, and receipts in SQLite.

- ``measure_behind``: a client that is many changes behind subscribes. Memory is what the process
  grows by. Then it submits all receipts, until they are stored.
- ``measure_stored``: receipts of one-second checkpoints complete in random order. Then the size of
  the file. A year takes some minutes of CPU.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from bench.usage import forget_rss_max, rss_bytes, rss_bytes_max
from checkpoints.compaction import compact
from checkpoints.memory import MemoryCheckpointSource
from checkpoints.model import Checkpoint, CommittedVersion, Span, ledger_key
from checkpoints.receipt_book import ReceiptBook
from checkpoints.recovery import RecoveryService, RecoverySettings
from checkpoints.stores.sql import SqlReceiptStore

YEAR_S = 365 * 24 * 3600
CHANGES, CHANGES_EACH = 1_000_000, 1_000
SECONDS, WINDOW = 1_000_000, 10_000
SUBMITTED_AT_ONCE = 1_000
STORED_AT_ONCE = 100_000
KEYS = 100_003
"""Ledgers that change in turn, more than are ever in flight."""


class Past(MemoryCheckpointSource):
    """Checkpoints of ``change_count`` different ledgers in random order, made when requested."""

    def __init__(self, change_count: int, *, changes_each: int) -> None:
        super().__init__()
        self._change_count, self._changes_each = change_count, changes_each
        # A multiplier without common factor visits every ledger once, in no order.
        self._step = next(
            step for step in range(7919, 10**6, 2) if math.gcd(step, change_count) == 1
        )

    async def request_checkpoints(self, earliest_time_ms: int) -> AsyncGenerator[Checkpoint, None]:
        first = 1 << 33  # as large as zxids are
        for start in range(self._change_count - self._changes_each, -1, -self._changes_each):
            numbers = range(start, start + self._changes_each)
            yield Checkpoint(
                id=first + start + self._changes_each,
                previous_id=first + start,
                time_ms=earliest_time_ms + 1,
                spans=tuple(
                    Span(
                        ledger_key(number * self._step % self._change_count),
                        first,
                        first + number + 1,
                        number << 20,
                    )
                    for number in numbers
                ),
            )


class SilentListener:
    async def receive(self, committed: CommittedVersion) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindFigures:
    """``known_s``: from subscribing until all missed objects are known."""

    change_count: int
    known_s: float
    memory_mb: float
    submitted_per_s: float

    def text(self) -> str:
        return (
            f"behind: {self.change_count:,} changes, all known after {self.known_s:.1f} s; "
            f"{self.memory_mb:.0f} MB; then {self.submitted_per_s:,.0f} receipts/s until all are "
            "stored"
        )


async def measure_behind(
    change_count: int = CHANGES, *, changes_each: int = CHANGES_EACH
) -> BehindFigures:
    """Recover, and process everything. ``changes_each``: in a checkpoint."""
    with TemporaryDirectory(prefix="feed-receipts-") as folder:
        url = f"sqlite:///{folder}/behind.db"
        store = await SqlReceiptStore.open(url, client="bench")
        await store.store_low_watermark(1 << 33)
        source = Past(change_count, changes_each=changes_each)
        settings = RecoverySettings(recover_back_s=math.inf)
        async with RecoveryService.open(source, store, settings=settings) as service:
            before_bytes = rss_bytes(os.getpid())
            forget_rss_max(os.getpid())
            start_s = time.perf_counter()
            missed = await service.subscribe(SilentListener())
            known_s = time.perf_counter() - start_s
            grown_bytes = rss_bytes_max(os.getpid()) - before_bytes
            assert len(missed) == change_count
            start_s = time.perf_counter()
            for number, committed in enumerate(missed):
                receipt = service.submit_receipt(committed.key, committed.version)
                if number % SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await receipt
            submit_s = time.perf_counter() - start_s
        await store.close()
    return BehindFigures(
        change_count=change_count,
        known_s=known_s,
        memory_mb=grown_bytes / 1e6,
        submitted_per_s=change_count / submit_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFigures:
    """``row_count_max``: before a compaction. ``file_bytes``: in the end."""

    second_count: int
    window: int
    took_s: float
    row_count_max: int
    file_bytes: int

    def text(self) -> str:
        return (
            f"stored: {self.second_count:,} checkpoints ({self.second_count / YEAR_S:.0%} of a "
            f"year), {self.window:,} in flight, in {self.took_s:.0f} s; at most "
            f"{self.row_count_max:,} rows; the file has {self.file_bytes:,} bytes in the end"
        )


async def measure_stored(
    second_count: int = SECONDS, *, window: int = WINDOW, stored_at_once: int = STORED_AT_ONCE
) -> StoredFigures:
    """Complete checkpoints of one change in random order, ``window`` of them in flight.

    Everything is done by the book and the store, without the service, whose tasks add nothing.
    """
    with TemporaryDirectory(prefix="feed-receipts-") as folder:
        path = Path(folder) / "stored.db"
        store = await SqlReceiptStore.open(f"sqlite:///{path}", client="bench")
        await store.store_low_watermark(0)
        client = RandomClient(window)
        start_s, row_count_max = time.perf_counter(), 0
        for start in range(0, second_count, stored_at_once):
            client.receive(range(start, min(start + stored_at_once, second_count)))
            await client.write(store)
            row_count_max = max(row_count_max, await row_count(store))
            await compact(store)
        client.complete_all()
        await client.write(store)
        await compact(store)
        assert await row_count(store) == 0
        await store.close()
        return StoredFigures(
            second_count=second_count,
            window=window,
            took_s=time.perf_counter() - start_s,
            row_count_max=row_count_max,
            file_bytes=path.stat().st_size,
        )


class RandomClient:
    """Is given checkpoints of one change each, and submits receipts in random order. ``window``:
    changes in flight."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._book = ReceiptBook(low_watermark=0)
        self._book.end_recovery()
        self._rng = random.Random(1)
        self._in_flight: list[int] = []

    def receive(self, numbers: range) -> None:
        """Receive these checkpoints, and complete as many."""
        for number in numbers:
            span = Span(ledger_key(number % KEYS), 0, 10 * number + 10, number)
            checkpoint = Checkpoint(10 * number + 10, 10 * number, 1000 * number, (span,))
            self._book.add(checkpoint, now_s=0.0)
            self._in_flight.append(number)
            if len(self._in_flight) > self._window:
                self._complete_one()

    def complete_all(self) -> None:
        while self._in_flight:
            self._complete_one()

    async def write(self, store: SqlReceiptStore) -> None:
        """Write what the store lacks, as the service does."""
        if (unstored := self._book.unstored()) is not None:
            if unstored.low_watermark is not None:
                await store.store_low_watermark(unstored.low_watermark)
            await store.store_checkpoint_range_receipts(unstored.ranges)
            self._book.mark_stored(unstored)

    def _complete_one(self) -> None:
        in_flight = self._in_flight
        index = int(self._rng.random() * len(in_flight))
        in_flight[index], in_flight[-1] = in_flight[-1], in_flight[index]
        number = in_flight.pop()
        self._book.submit(ledger_key(number % KEYS), 10 * number + 10)


async def row_count(store: SqlReceiptStore) -> int:
    return len([row async for row in store.get_checkpoint_range_receipts(0)])


@click.command()
@click.option("--changes", default=CHANGES, show_default=True, help="0: without this part.")
@click.option("--changes-each", default=CHANGES_EACH, show_default=True, help="In a checkpoint.")
@click.option("--seconds", default=SECONDS, show_default=True, help=f"A year has {YEAR_S}.")
@click.option("--window", default=WINDOW, show_default=True, help="Checkpoints in flight.")
def main(changes: int, changes_each: int, seconds: int, window: int) -> None:
    """Measure the client's side of the change feed."""
    if changes:
        figures = asyncio.run(measure_behind(changes, changes_each=changes_each))
        click.echo(figures.text())
    if seconds:
        click.echo(asyncio.run(measure_stored(seconds, window=window)).text())


if __name__ == "__main__":
    main()
