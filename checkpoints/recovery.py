"""The service through which a client follows the feed, and recovers what it missed.

A client processes the present state of each object that changed, and submits a receipt. After any
failure it subscribes again, and is given exactly the objects that may lack its work: each once, at
its latest version. Delivery is *at least once*. So the work must be idempotent, and must not depend
on the versions between.

Example::

    async with RecoveryService.open(source, store) as service:
        missed = await service.subscribe(listener)
        for committed in missed:
            await work(committed)
            service.submit_receipt(committed.key, committed.version)

What a client may rely on:

1. A receipt is stored when every object of its checkpoint has one. Submitting may be repeated.
2. A later version of an object subsumes the earlier one. The low watermark never passes a change
   that lacks a receipt.
3. ``subscribe`` returns what has no receipt, each object once. The listener gets all later changes.
4. A client without any receipt is new, and missed nothing. To follow from a certain checkpoint on,
   store its id as the low watermark before the first process opens the service. If older changes
   cannot be learnt, because of ``recover_back_s`` or the retention of the log, ``Missed.lifted``
   tells so. Each ``subscribe`` of a new process tells both again until the client submits a
   receipt.
5. What this process was given in the last seconds is not called missed.
6. Whatever fails, a change is given again until its receipt is stored.
7. Stored receipts are merged, so the store does not grow.
8. A client with a filter acknowledges what it does not see.
9. An object that fails does not stop the others. It can be given again on request.
10. The later of two processes of one client fences the earlier.
11. Receipts for checkpoints that the log does not have are deleted, and the service ends with
    PositionUnknownError. Opened again, the client is new.

The decisions are in ``receipt_book``. This module reads the source, writes the store, and waits.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import structlog

from checkpoints.errors import PositionUnknownError
from checkpoints.model import (
    Checkpoint,
    CheckpointId,
    CheckpointSource,
    CommittedVersion,
    Key,
    LogId,
    Span,
    SpanFilter,
    Version,
)
from checkpoints.receipt_book import ReceiptBook, Unstored
from checkpoints.receipts import Failure, RangeMerger, ReceiptStore, compact
from ledgers.clock import Clock, SystemClock
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    NotSharedError,
    QuotaError,
    UnavailableError,
)
from ledgers.tasks import task_scope

T = TypeVar("T")

log = structlog.get_logger()

ARRIVED_MAX: Final = 20_000
"""Changes that are kept while a client recovers: a few megabytes. The source waits beyond it. An
empty checkpoint counts as one."""
STORE_TIMEOUT_S: Final = 10.0
"""A call of the store that takes longer counts as failed, and is repeated."""
RETRY_WAIT_MAX_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 5.0
"""At the end, receipts are written for at most this long. The others are given again."""
REASON_CHARS_MAX: Final = 1_000
"""Longer reasons of failures are cut."""
_SPANS_AT_ONCE: Final = 10_000
"""After so many changes of the past, other tasks of the loop run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings:
    """How far a client recovers, and how its receipts are written."""

    recover_back_s: float = 7 * 24 * 3600.0
    """Checkpoints older than this are not recovered. Infinity: no bound. 0: recover none."""
    being_worked_on_s: float = 5.0
    """A change that the client was given within this time is not called missed. 0: every change
    without a receipt is called missed."""
    compaction_interval_s: float = 60.0
    """How often stored receipts are merged."""
    retry_wait_s: float = 0.1
    """Wait after a failed call of the store. It doubles with each further failure."""

    def __post_init__(self) -> None:
        assert self.recover_back_s >= 0, self
        assert self.being_worked_on_s >= 0, self
        assert self.compaction_interval_s > 0, self
        assert self.retry_wait_s > 0, self


class LiftReason(enum.Enum):
    """Why older changes cannot be learnt any more."""

    BOUND = "bound"
    """They are older than ``recover_back_s``."""
    RETENTION = "retention"
    """The source has deleted them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkLift:
    """The client may have missed changes after ``from_id`` up to ``to_id`` that it will never be
    told: it should compare its state with the whole cluster, before its next receipt."""

    from_id: CheckpointId
    to_id: CheckpointId
    because: LiftReason


class CommittedVersionListener(Protocol):
    """Receives every change that is committed after ``subscribe``."""

    async def receive(self, committed: CommittedVersion) -> None:
        """Handle one change. The next one follows when this call returns.

        Do not wait here for the receipt of the same object: it is stored when the other objects of
        its checkpoint have receipts too, and those come later. If this call raises, the object and
        the rest of its checkpoint are missed, and the error reaches the source.
        """
        ...


class Missed:
    """The objects that have no receipt, each once at its latest version, oldest first.

    An object that meanwhile got a receipt, or a version that the listener was given, is left out.
    ``len`` is the number of objects still to come. ``is_new``: the client has never submitted a
    receipt, so it missed nothing. ``lifted``: set if it may have missed more than this.
    """

    def __init__(
        self, book: ReceiptBook, clock: Clock, *, is_new: bool, lifted: WatermarkLift | None
    ) -> None:
        self._book, self._clock = book, clock
        self.is_new, self.lifted = is_new, lifted

    def __len__(self) -> int:
        return self._book.missed_count

    def __iter__(self) -> Iterator[CommittedVersion]:
        take_missed, now_s = self._book.take_missed, self._clock.now_s
        while (committed := take_missed(now_s=now_s())) is not None:
            yield committed


class StoredReceipt(Awaitable[None]):
    """Ends when the receipt is stored: awaiting it is optional.

    Raises ClientFencedError, SessionLostError or another error that ended the service, and
    UnavailableError if the service was closed before.
    """

    __slots__ = ("_key", "_service", "_version")

    def __init__(self, service: RecoveryService, key: Key, version: Version) -> None:
        self._service, self._key, self._version = service, key, version

    def __await__(self) -> Generator[Any, None, None]:
        return self._service._wait_stored(self._key, self._version).__await__()


class RecoveryService:
    """One client of the feed. Belongs to one event loop.

    Receipts are written by a task of the service, many at once. Its block (``open``) ends with
    ClientFencedError if another process follows the feed under the same name, and with any other
    error of the store that no retry can help. UnavailableError of the store is retried for ever.
    """

    def __init__(
        self,
        source: CheckpointSource,
        store: ReceiptStore,
        *,
        settings: RecoverySettings,
        clock: Clock,
        wanted: SpanFilter | None,
    ) -> None:
        self._source, self._store = source, store
        self._settings, self._clock, self._wanted = settings, clock, wanted
        self._book: ReceiptBook | None = None
        self._listener: CommittedVersionListener | None = None
        self._subscribing = asyncio.Lock()
        """Guards the recovery: one at a time."""
        self._is_recovering = False
        self._arrived: deque[Checkpoint] = deque()
        """Checkpoints that the source sent during the recovery."""
        self._arrived_count = 0
        self._lifted: WatermarkLift | None = None
        """Changes that ``subscribe`` has not returned yet."""
        self._recovered = asyncio.Event()
        self._changed = asyncio.Event()
        """The store lacks something, or the service failed."""
        self._storing = asyncio.Lock()
        """Guards the way from ``ReceiptBook.unstored`` to ``mark_stored``."""
        self._writing = asyncio.Lock()
        """Guards calls of the store that write: one at a time, so they are applied in order."""
        self._waiting: dict[CheckpointId | Key, asyncio.Future[None]] = {}
        """Ends when the receipt of the checkpoint is stored, or the failure of the object is
        deleted."""
        self._failure: BookmenderError | None = None
        self._is_compaction_due = True
        self._stored_log: LogId | None = None
        """The ledger of the log that the furthest stored receipt belongs to."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        source: CheckpointSource,
        store: ReceiptStore,
        *,
        settings: RecoverySettings | None = None,
        clock: Clock | None = None,
        wanted: SpanFilter | None = None,
    ) -> AsyncIterator[RecoveryService]:
        """Run the service for the duration of the block. The caller closes source and store.

        ``wanted``: the changes that the client wants to see; it acknowledges all others
        implicitly. None: all changes.
        """
        service = cls(
            source,
            store,
            settings=settings or RecoverySettings(),
            clock=clock or SystemClock(),
            wanted=wanted,
        )
        async with task_scope() as scope:
            scope.start(service._write_receipts())
            scope.start(service._compact_receipts())
            try:
                yield service
            finally:
                await service._close()

    # --- The client's calls -----------------------------------------------------------------------

    async def subscribe(self, listener: CommittedVersionListener) -> Missed:
        """Return what the client missed. The listener is given every change after that.

        The first call reads receipts and checkpoints. A later call replaces the listener, and
        calls missed what was given longer than ``being_worked_on_s`` ago and has no receipt.
        Raises UnavailableError: nothing was changed, call again. Raises PositionUnknownError.
        """
        self._raise_if_failed()
        async with self._subscribing:
            self._listener = listener
            if self._book is None:
                self._book = await self._recover()
            else:
                until_s = self._clock.now_s() - self._settings.being_worked_on_s
                self._book.offer_again(shared_until_s=until_s)
            lifted, self._lifted = self._lifted, None
            return Missed(self._book, self._clock, is_new=self._book.is_new, lifted=lifted)

    def submit_receipt(self, key: Key, version: Version) -> StoredReceipt:
        """Record that the client has processed the object up to this version.

        May be repeated. The result can be awaited; it ends when every object of the checkpoint has
        a receipt and the receipt of the checkpoint is stored. Raises NotSharedError if no
        checkpoint had this version so far.
        """
        self._raise_if_failed()
        self._subscribed_book.submit(key, version)
        self._changed.set()
        return StoredReceipt(self, key, version)

    async def submit_failure(self, key: Key, version: Version, because: str) -> None:
        """Record that the client cannot process this version. Returns when this is stored.

        From then on it counts as a receipt, so that one object does not stop the others. Reasons
        are cut after REASON_CHARS_MAX characters, and characters that are not valid Unicode are
        replaced. Raises NotSharedError, and QuotaError if the store has no room for it.
        """
        self._raise_if_failed()
        book = self._subscribed_book
        because = because[:REASON_CHARS_MAX].encode(errors="replace").decode()
        failure = book.failure_of(key, version, because=because, now_ms=self._clock.wall_ms())
        try:
            await self._patiently(
                lambda: self._write(lambda: self._store.store_failure(failure)), hopeless=QuotaError
            )
        except BaseException:  # cancelled: the failure may be stored, but the object still waits
            book.withdraw(failure)
            self._changed.set()
            raise
        book.fail(failure)
        self._changed.set()

    def failures(self) -> Sequence[Failure]:
        """Return the failed objects, lowest version first. A later receipt of the object removes
        its failure."""
        failures = self._subscribed_book.failures.values()
        return sorted(failures, key=lambda failure: failure.version)

    async def retry_failures(self, only: Container[Key] | None = None) -> int:
        """Give the listener each failed object again, and return their number.

        ``only``: keys of the objects; None: all. An object whose later version lacks a receipt is
        left out: the client is given that one.
        """
        self._raise_if_failed()
        book, listener = self._subscribed_book, self._listener
        assert listener is not None
        offered_count = 0
        for failure in self.failures():
            if only is not None and failure.key not in only:
                continue
            if book.pending_version(failure.key) is None and failure.key in book.failures:
                await listener.receive(
                    CommittedVersion(failure.key, failure.version, None, failure.is_deleted)
                )
                offered_count += 1
        return offered_count

    @property
    def low_watermark(self) -> CheckpointId | None:
        """The id up to which nothing lacks a receipt; None for a client that was given nothing."""
        return None if self._book is None else self._book.low_watermark

    @property
    def pending_count(self) -> int:
        """Number of known objects that lack a receipt."""
        return 0 if self._book is None else self._book.pending_count

    # --- The source's calls -----------------------------------------------------------------------

    async def receive_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Handle a new checkpoint. Called by the source only."""
        if self._is_recovering:
            if self._arrived_count < ARRIVED_MAX:
                self._arrived.append(checkpoint)
                self._arrived_count += max(1, len(checkpoint.spans))
                return
            await self._recovered.wait()
        if self._failure is None and self._book is not None:
            await self._give(self._book, checkpoint)

    async def _give(self, book: ReceiptBook, checkpoint: Checkpoint) -> None:
        """Give the client the changes of a new checkpoint."""
        spans = self._add(book, checkpoint)
        for number, span in enumerate(spans):
            assert self._listener is not None
            committed = CommittedVersion(
                span.key, span.end, span.fingerprint, span.is_deleted, checkpoint.time_ms
            )
            try:
                await self._listener.receive(committed)
            except BaseException:
                book.miss(spans[number:])
                raise

    def _add(self, book: ReceiptBook, checkpoint: Checkpoint) -> Sequence[Span]:
        """Return the changes to give to the client."""
        try:
            spans = book.add(checkpoint, now_s=self._clock.now_s())
        except CorruptionError as error:  # a new recovery, by a new service, reads the log again
            self._fail(error)
            return ()
        self._changed.set()  # a checkpoint without wanted changes is complete
        return spans

    # --- Recovery ---------------------------------------------------------------------------------

    async def _recover(self) -> ReceiptBook:
        """Return the book of the client, after everything that arrived meanwhile was given.

        There is no gap, because the listener is registered before the past is read. The book
        ignores checkpoints that come both ways. If the listener raises, the book stays, and the
        next ``subscribe`` gives what this one did not.
        """
        self._is_recovering, self._arrived_count = True, 0
        self._recovered.clear()
        self._source.register_checkpoint_listener(self)
        try:
            book, self._lifted = await self._load()
            self._raise_if_failed()
        except BaseException:
            self._source.remove_checkpoint_listener(self)
            self._arrived.clear()
            self._end_recovery()
            raise
        self._book = book  # the listener may submit receipts
        try:
            while self._arrived:
                await self._give(book, self._arrived.popleft())
        finally:
            while self._arrived:
                book.miss(self._add(book, self._arrived.popleft()))
            self._end_recovery()
        self._changed.set()
        return book

    def _end_recovery(self) -> None:
        self._is_recovering = False
        self._recovered.set()

    async def _load(self) -> tuple[ReceiptBook, WatermarkLift | None]:
        low_watermark = await self._read(self._store.get_low_watermark)
        failures = await self._read(self._store.get_failures)
        if low_watermark is None:
            # Only when the source has answered, it sends the listener everything that follows.
            async with aclosing(self._source.request_checkpoints(0)) as checkpoints:
                await anext(checkpoints, None)
            return ReceiptBook(low_watermark=None, failures=failures, wanted=self._wanted), None
        self._stored_log = await self._read(self._store.get_log)
        async with (
            self._in_time(STORE_TIMEOUT_S),
            aclosing(self._store.get_checkpoint_range_receipts(low_watermark)) as rows,
        ):
            merger = RangeMerger()
            async for row in rows:
                merger.add(row)
        book = ReceiptBook(
            low_watermark=low_watermark,
            receipts=merger.ranges,
            failures=failures,
            wanted=self._wanted,
        )
        before = book.low_watermark
        assert before is not None
        try:
            reached = await self._read_past(book)
        except PositionUnknownError as error:
            log.error("client.position_unknown", error=str(error), **error.context)
            await self._write(self._store.reset)
            raise
        lifted = None
        if reached > before:
            oldest = await self._source.oldest_previous_id()
            is_unbounded = self._settings.recover_back_s == math.inf
            is_deleted = is_unbounded or oldest >= reached
            because = LiftReason.RETENTION if is_deleted else LiftReason.BOUND
            lifted = WatermarkLift(from_id=before, to_id=reached, because=because)
            log.warning(
                "client.watermark_lifted", from_id=before, to_id=reached, because=because.value
            )
        book.end_recovery(lift_to=None if lifted is None else reached)
        return book, lifted

    async def _read_past(self, book: ReceiptBook) -> CheckpointId:
        """Read the checkpoints back to the low watermark, and return how far back they were found:
        everything after this id is known."""
        low_watermark = book.low_watermark
        assert low_watermark is not None
        back_ms = self._settings.recover_back_s * 1000
        earliest_ms = 0 if back_ms == math.inf else max(0, round(self._clock.wall_ms() - back_ms))
        reached: CheckpointId | None = None
        span_count = 0
        async with aclosing(self._source.request_checkpoints(earliest_ms)) as checkpoints:
            async for checkpoint in checkpoints:
                if reached is not None and checkpoint.id < reached:
                    return reached  # those between are lost
                if not book.recover(checkpoint):
                    return low_watermark
                reached = checkpoint.previous_id
                if reached <= low_watermark:
                    return low_watermark
                span_count += len(checkpoint.spans)
                if span_count >= _SPANS_AT_ONCE:
                    span_count = 0
                    await asyncio.sleep(0)
        if reached is not None:
            return reached
        # Nothing is younger than the bound. Everything up to the last checkpoint is given up, but
        # not what was committed since then: the listener is sent that.
        async with aclosing(self._source.request_checkpoints(0)) as checkpoints:
            async for checkpoint in checkpoints:
                if checkpoint.time_ms < earliest_ms:
                    return max(checkpoint.id, low_watermark)
        return max(await self._source.oldest_previous_id(), low_watermark)

    # --- The store --------------------------------------------------------------------------------

    async def _write_receipts(self) -> None:
        """Write receipts whenever the store lacks some. Raises the error that ends the service."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._raise_if_failed()
            await self._patiently(self._write_unstored)

    async def _write_unstored(self) -> None:
        """Write what the store lacks. Raises UnavailableError: some of it may be written."""
        async with self._storing:
            book = self._book
            unstored = None if book is None else book.unstored()
            if book is not None and unstored is not None:
                await self._write_all(book, unstored)

    async def _write_all(self, book: ReceiptBook, unstored: Unstored) -> None:
        # First: a receipt without its log would not tell that ZooKeeper was restored.
        furthest = max(unstored.low_watermark or 0, *(each.end for each in unstored.ranges), 0)
        try:
            log_id, known = self._source.log_of(furthest), self._stored_log
        except PositionUnknownError as error:
            self._fail(error)
            raise
        if log_id not in (None, known) and (not known or log_id.previous_id >= known.previous_id):
            await self._write(lambda: self._store.store_log(log_id))
            self._stored_log = log_id
        if (low_watermark := unstored.low_watermark) is not None:
            await self._write(lambda: self._store.store_low_watermark(low_watermark))
        for key, version in unstored.processed:

            async def delete(key: Key = key, version: Version = version) -> None:
                if book.is_deletion_unstored(key):  # while this waited, it may have failed again
                    await self._store.delete_failure(key, up_to=version)

            await self._write(delete)
        if unstored.ranges:
            await self._write(lambda: self._store.store_checkpoint_range_receipts(unstored.ranges))
        self._is_compaction_due = True
        book.mark_stored(unstored)
        tokens: list[CheckpointId | Key] = list(unstored.completed)
        tokens += [key for key, _ in unstored.processed]
        for token in tokens:
            if (future := self._waiting.pop(token, None)) is not None and not future.done():
                future.set_result(None)

    async def _compact_receipts(self) -> None:
        """Merge the stored receipts from time to time."""
        while True:
            await self._clock.sleep(self._settings.compaction_interval_s)
            if self._book is None or self._book.is_new or not self._is_compaction_due:
                continue
            self._is_compaction_due = False
            try:
                async with self._in_time(self._settings.compaction_interval_s):
                    await compact(self._store, write=self._write)
            except UnavailableError as error:
                log.warning("client.compaction_failed", error=str(error))
                self._is_compaction_due = True
            except BookmenderError as error:
                self._fail(error)
                raise

    async def _wait_stored(self, key: Key, version: Version) -> None:
        while True:
            self._raise_if_failed()
            book = self._subscribed_book
            token: CheckpointId | Key | None = book.unstored_checkpoint(version)
            if token is None:
                if not book.is_deletion_unstored(key):
                    return
                token = key
            future = self._waiting.get(token)
            if future is None:
                future = self._waiting[token] = asyncio.get_running_loop().create_future()
            await asyncio.shield(future)  # others wait for it too

    async def _read(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the store once. Raises UnavailableError, also if it takes too long."""
        async with self._in_time(STORE_TIMEOUT_S):
            return await call()

    async def _write(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call the store once, after other writes. Raises UnavailableError, also if it takes too
        long. Any other error ends the service."""
        async with self._writing:
            try:
                async with self._in_time(STORE_TIMEOUT_S):
                    await call()
            except UnavailableError:
                raise
            except BookmenderError as error:
                self._fail(error)
                raise

    async def _patiently(
        self,
        write: Callable[[], Awaitable[None]],
        *,
        hopeless: type[UnavailableError] | tuple[()] = (),
    ) -> None:
        """Repeat until the store answers, or until the service ends: then raise what ended it.
        ``hopeless``: an error that is raised at once."""
        wait_s = self._settings.retry_wait_s
        while True:
            try:
                return await write()
            except hopeless:
                raise
            except UnavailableError as error:
                log.warning("client.store_failed", error=str(error), wait_s=wait_s)
            await self._clock.sleep(wait_s)
            self._raise_if_failed()
            wait_s = min(2 * wait_s, RETRY_WAIT_MAX_S)

    @asynccontextmanager
    async def _in_time(self, limit_s: float) -> AsyncIterator[None]:
        """Limit calls of the store. Raises UnavailableError when time is up."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            raise UnavailableError("the store of receipts did not answer in time") from error

    # --- The end ----------------------------------------------------------------------------------

    @property
    def _subscribed_book(self) -> ReceiptBook:
        if self._book is None:
            raise NotSharedError("nothing was given to the client before it subscribes")
        return self._book

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BookmenderError) -> None:
        """End the service: its block and every wait raise the error."""
        self._failure = error
        self._fail_waiting(error)
        self._changed.set()

    def _fail_waiting(self, error: BookmenderError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # a waiter may be gone: no complaint about an unread error
        self._waiting.clear()

    async def _close(self) -> None:
        """Write the receipts that are complete, if the store answers."""
        self._source.remove_checkpoint_listener(self)
        try:
            if self._failure is None:
                with suppress(UnavailableError, TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await self._write_unstored()
        finally:
            if self._failure is None:
                self._failure = UnavailableError("the service was closed")
            self._fail_waiting(self._failure)
