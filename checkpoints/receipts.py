"""Receipts: which checkpoints a client has processed, and the interface of their store.

A receipt covers an inclusive range of zxids. The receipt of one checkpoint begins right after
``previous_id`` and ends with ``id``. So two receipts that touch become one without a look at the
checkpoints, and a single pair of numbers may cover a year.

The *low watermark* of a client is the id up to which everything has a receipt or is not needed any
more.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from checkpoints.model import CheckpointId, Key, LogId, Version
from ledgers.errors import SettingsError

CLIENT_CHARS_MAX: Final = 200
RANGES_AT_ONCE: Final = 1_000
"""Merged receipts that are written to the store in one call."""
FENCED: Final = "another process follows the feed as this client. Two processes need two names"
DELETED: Final = "the client was deleted, with all of its receipts"


class ReceiptRange(NamedTuple):
    """A receipt for all changes with zxids from ``begin`` to ``end``, inclusive at both ends.

    ``begin``: ``previous_id + 1`` of the first checkpoint. ``end``: ``id`` of the last one.
    """

    begin: Version
    end: CheckpointId

    def contains(self, other: ReceiptRange) -> bool:
        return self.begin <= other.begin and other.end <= self.end


class Failure(Struct, frozen=True, kw_only=True):
    """A negative receipt: the client could not process this version of the object.

    ``because``: the client's reason, in its own words. ``time_ms``: wall clock of the client.
    ``is_deleted``: the object was deleted at this version, as far as the client was told.
    ``is_retry_ordered``: an operator wants the client to try again.
    """

    key: Key
    version: Version
    because: str
    time_ms: int
    is_deleted: bool = False
    is_retry_ordered: bool = False


class ClientSummary(Struct, frozen=True, kw_only=True):
    """A client as its store knows it, for operators.

    ``generation``: of the feed that the receipts belong to; 0: unknown. ``low_watermark``: None:
    the client has not submitted any receipt. ``receipt_count``: receipts after the low watermark.
    """

    name: str
    generation: int = 0
    low_watermark: CheckpointId | None = None
    receipt_count: int = 0
    failures: Sequence[Failure] = ()


def check_client_name(name: str) -> None:
    """Raise SettingsError if no store takes this name of a client."""
    if not 0 < len(name) <= CLIENT_CHARS_MAX:
        raise SettingsError(
            f"the name of a client has {len(name)} characters; allowed: 1 to {CLIENT_CHARS_MAX}"
        )
    if name in (".", "..") or not name.isprintable():
        raise SettingsError(
            "the name of a client must consist of printable characters, and must not be '.' or '..'"
        )


class ClientTable(Protocol):
    """All clients of a store, for operators. Changes fence no process, except that a deleted
    client can write nothing more. Every call may raise UnavailableError."""

    async def list(self) -> Sequence[ClientSummary]:
        """Return all clients, by name."""
        ...

    async def find(self, name: str) -> ClientSummary | None:
        """Return one client; None if the store does not know it."""
        ...

    async def delete(self, name: str) -> bool:
        """Delete everything about a client. Returns False if the store does not know it."""
        ...

    async def order_retries(self, name: str) -> int:
        """Mark all failures of the client, so that it tries these objects again. Returns their
        number."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class ClientProcess:
    """A process that follows the feed as a client: one object for each client and store.

    A program that opens the feed again, for example after a lost session, opens it with the same
    object. If another process of this client has opened the store since, this one is fenced. With
    a new object it would fence the later process, and the two would take turns for ever.
    """

    def __init__(self) -> None:
        self.id: Final = secrets.token_hex(8)
        """The store keeps the id of the process that opened it last."""
        self.epoch: int | None = None
        """Epoch of the client when this process last opened the store; None: it has not yet. A
        first try whose outcome is unknown does not count."""
        self.log: tuple[int, LogId | None] = (0, None)
        """The generation of the feed and the ledger of its log that this process followed last."""

    @property
    def has_opened(self) -> bool:
        return self.epoch is not None

    def is_fenced_by(self, *, epoch: int, process: str) -> bool:
        """Return True if another process has opened the store since.

        ``epoch``, ``process``: as they are stored. A lower epoch than ours is no later process:
        the store was restored from a backup.
        """
        return self.epoch is not None and process != self.id and epoch >= self.epoch

    def is_after(self, epoch: int) -> bool:
        """Return True if this process opened the store after it had this epoch."""
        return self.epoch is not None and self.epoch > epoch


class ReceiptStore(Protocol):
    """The receipts of one client.

    Opening a store fences the process that opened it for the same client before: all calls of that
    process raise ClientFencedError from then on, and so does opening the store again
    (``ClientProcess``). If the store was restored from a backup meanwhile, they raise
    PositionUnknownError instead. Every call may raise UnavailableError. After a
    failed write it is unknown whether the write was applied, and it may even be applied later. So
    each write may be repeated, and a late write undoes nothing: see each method.
    """

    async def store_low_watermark(self, checkpoint_id: CheckpointId) -> None:
        """Store the low watermark. Does nothing if the stored one is higher."""
        ...

    async def get_low_watermark(self) -> CheckpointId | None:
        """Return the low watermark; None if none was ever stored: the client is new."""
        ...

    async def store_checkpoint_range_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        """Store receipts, all or none. A stored receipt with the same begin and a lower end is
        extended; one with a higher end stays. The store may merge receipts that touch.
        """
        ...

    def get_checkpoint_range_receipts(
        self, antecedent: CheckpointId
    ) -> AsyncGenerator[ReceiptRange, None]:
        """Yield the receipts that end after ``antecedent``, highest begin first. Ranges may
        overlap. Use it within ``contextlib.aclosing``."""
        ...

    async def purge_checkpoint_receipts(self, ranges: Sequence[ReceiptRange]) -> None:
        """For each range, delete the receipts that lie within it, inclusive at both ends, and are
        not equal to it."""
        ...

    async def store_failure(self, failure: Failure) -> None:
        """Store a negative receipt. It replaces one of the same or an earlier version of the
        object; one of a later version stays."""
        ...

    async def get_failures(self) -> Sequence[Failure]:
        """Return all negative receipts, lowest version first."""
        ...

    async def delete_failure(self, key: Key, *, up_to: Version) -> None:
        """Delete the negative receipt of the object if its version is not after ``up_to``."""
        ...

    async def store_log(self, log_id: LogId) -> None:
        """Store which ledger of the log the furthest receipt belongs to."""
        ...

    async def get_log(self) -> LogId | None:
        """Return what ``store_log`` stored; None if nothing was stored for this feed."""
        ...

    async def reset(self) -> None:
        """Delete all receipts and failures, because they are of a feed that exists no more. The
        client is new then, and the next process that opens the store is told."""
        ...

    async def close(self) -> None:
        """Release connections. May be called repeatedly; no other call may follow."""
        ...


def first_epoch() -> int:
    """Return the first epoch of a client in a store. It follows the time: if an operator deletes
    the client, and a process opens it again, a process of the deleted client has a lower epoch."""
    return (time.time_ns() // 1_000_000 << 12) + secrets.randbelow(1 << 12)


class RangeMerger:
    """Merges receipts that come with the highest begin first, as stores yield them.

    Keeps only the merged ranges in memory.
    """

    def __init__(self, descending: Iterable[ReceiptRange] = ()) -> None:
        self._merged: list[tuple[ReceiptRange, int]] = []
        """Ranges that neither overlap nor touch, highest first, and the number of receipts in
        each."""
        for each in descending:
            self.add(each)

    def add(self, new: ReceiptRange) -> None:
        """Add a receipt. It may reach beyond several ranges that began after it."""
        begin, end = new
        count = 1
        while self._merged and end >= self._merged[-1][0].begin - 1:
            above, above_count = self._merged.pop()
            assert begin <= above.begin, (new, above)
            end = max(end, above.end)
            count += above_count
        self._merged.append((ReceiptRange(begin, end), count))

    @property
    def ranges(self) -> list[ReceiptRange]:
        """Return the same receipts as ranges that neither overlap nor touch, lowest first."""
        return [each for each, _ in reversed(self._merged)]

    @property
    def joined(self) -> list[ReceiptRange]:
        """Return those ranges that consist of several receipts, lowest first."""
        return [each for each, count in reversed(self._merged) if count > 1]


class RangeSet:
    """Ranges that neither overlap nor touch. Adding one takes constant time.

    Two dicts suffice, because ranges touch where the end of one is the begin of the next less one.
    """

    def __init__(self, ranges: Iterable[ReceiptRange] = ()) -> None:
        """``ranges`` must not overlap."""
        self._end_by_begin: dict[Version, CheckpointId] = {}
        self._begin_by_end: dict[CheckpointId, Version] = {}
        for each in ranges:
            self.add(each)

    def __len__(self) -> int:
        return len(self._end_by_begin)

    def __iter__(self) -> Iterator[ReceiptRange]:
        """Yield the ranges, lowest first."""
        return (ReceiptRange(*pair) for pair in sorted(self._end_by_begin.items()))

    def beginning_at(self, begin: Version) -> ReceiptRange | None:
        """Return the range that begins there; None if no range does."""
        end = self._end_by_begin.get(begin)
        return None if end is None else ReceiptRange(begin, end)

    def add(self, new: ReceiptRange) -> ReceiptRange:
        """Add a range that overlaps no other. Returns the range that contains it after merging."""
        begin, end = new
        assert begin <= end, new
        assert begin not in self._end_by_begin, new
        if (lower_begin := self._begin_by_end.pop(begin - 1, None)) is not None:
            begin = lower_begin
        if (higher_end := self._end_by_begin.pop(end + 1, None)) is not None:
            end = higher_end
        self._end_by_begin[begin] = end
        self._begin_by_end[end] = begin
        return ReceiptRange(begin, end)

    def remove(self, old: ReceiptRange) -> None:
        """Remove one of the ranges, as ``beginning_at`` returned it."""
        del self._end_by_begin[old.begin]
        del self._begin_by_end[old.end]


# --- Compaction -----------------------------------------------------------------------------------

Write = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]


async def _plainly(call: Callable[[], Awaitable[None]]) -> None:
    await call()


async def compact(store: ReceiptStore, *, write: Write = _plainly) -> None:
    """Merge the receipts of the client, and delete those that the low watermark covers.

    Receipts are stored as they complete, so neighbours may be separate rows. Each merged receipt is
    written first; then the rows that it contains are deleted. After an interruption between the two
    receipts overlap, which is harmless. May run while receipts are stored.

    ``write`` makes the writing calls. Raises UnavailableError: call again later.
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
    for start in range(0, len(merged), RANGES_AT_ONCE):
        part = merged[start : start + RANGES_AT_ONCE]
        await write(partial(store.store_checkpoint_range_receipts, part))
        await write(partial(store.purge_checkpoint_receipts, part))
