"""Helpers for concurrent calls.

- ``gather_in_parts`` runs many calls, a limited number at a time.
- ``task_scope`` starts tasks that end with the block that started them.
- ``read_ahead`` reads entries in order, several at a time.
- ``until_answered`` repeats a call until it succeeds, because a missing answer proves nothing (rule
  S8). It is for loops that live as long as their session: an overloaded ZooKeeper must not end
  them.
- ``SharedReads`` joins the calls of many callers into few reads, each newer than the call.
- ``Changing``, ``wake_on`` and ``wait_woken`` notify tasks that wait for a change. ``Watching``
  reads a value again whenever it may have changed.
- ``in_daemon_thread`` runs a call that blocks.
"""

import asyncio
import math
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import structlog

from ledgers.clock import Clock
from ledgers.errors import BookmenderError, LocalLimitError, SessionLostError, UnavailableError

T = TypeVar("T")
V = TypeVar("V")


async def gather_in_parts(
    work: Callable[[V], Awaitable[T]], values: Sequence[V], *, at_once: int
) -> list[T]:
    """Return the results of ``work``, in order. Runs at most ``at_once`` at a time."""
    given: list[T] = []
    for start in range(0, len(values), at_once):
        given += await asyncio.gather(*map(work, values[start : start + at_once]))
    return given


async def wake_on(events: AsyncGenerator[object, None], wake: asyncio.Event) -> None:
    """Set ``wake`` at each event, until the events end."""
    async with aclosing(events):
        async for _ in events:
            wake.set()


async def wait_woken(wake: asyncio.Event, *, timeout_s: float | None) -> bool:
    """Wait until ``wake`` is set. Returns False after ``timeout_s`` (None or infinity: never)."""
    try:
        async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
            await wake.wait()
    except TimeoutError:
        return False
    return True


class TaskScope:
    """Starts tasks that live no longer than their ``task_scope`` block."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        # A dict, not a set: tasks are cancelled in the order of their start, so simulations repeat.
        self._running: dict[asyncio.Task[Any], None] = {}

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._group.create_task(coroutine)
        self._running[task] = None
        task.add_done_callback(self._running.pop)
        return task

    def cancel(self) -> None:
        for task in list(self._running):
            task.cancel()


@asynccontextmanager
async def task_scope() -> AsyncIterator[TaskScope]:
    """A TaskGroup that cancels its remaining tasks at the end of the block, because a question to
    several bookies often ends before all tasks, and raises errors unwrapped, because callers sort
    them by class."""
    try:
        async with asyncio.TaskGroup() as group:
            scope = TaskScope(group)
            try:
                yield scope
            finally:
                scope.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class Changing:
    """Base of objects that count their changes. Belongs to one event loop. A waiting task passes
    the count that it has seen, so it misses no change."""

    def __init__(self) -> None:
        self.change_count = 0
        self._changed = asyncio.Event()

    async def wait_change(self, seen: int, *, timeout_s: float | None = None) -> None:
        """Wait until ``change_count`` differs from ``seen``, ``timeout_s`` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.change_count == seen:
                    await self._changed.wait()

    def changes(self) -> AsyncGenerator[None, None]:
        """Yield after each change since this call. Changes during a busy time are merged."""
        return self._changes_since(self.change_count)

    async def _changes_since(self, seen: int) -> AsyncGenerator[None, None]:
        while True:
            await self.wait_change(seen)
            seen = self.change_count
            yield

    def _notify_change(self) -> None:
        """Wake the waiting tasks. Called after the change is visible to them."""
        self.change_count += 1
        self._changed.set()
        self._changed.clear()  # later calls wait for the next change


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Round(Generic[K, V]):
    """The keys that callers ask for together. ``values``: None until they are read."""

    keys: set[K] = field(default_factory=set)
    values: dict[K, V] | None = None


class SharedReads(Generic[K, V]):
    """Joins the calls of many callers into few rounds of reads.

    A caller never gets a value whose read was in flight already when it called, because that value
    may be older than the call: it joins the next round. All callers of a round go on in one turn of
    the loop, so that what they write next can share a transaction.
    """

    def __init__(self, read: Callable[[K], Awaitable[V]]) -> None:
        self._read = read
        self._next = _Round[K, V]()
        self._is_reading = False
        self._end = asyncio.Event()

    async def get(self, keys: Iterable[K]) -> Mapping[K, V]:
        """Return the values of at least these keys, by reads that began after this call. Raises
        what a read raises; then the other callers of the round read again."""
        mine = self._next
        mine.keys.update(keys)
        while mine.values is None:
            if self._is_reading:
                await self._end.wait()
                continue
            if mine is self._next:
                self._next = _Round()
            self._is_reading, wanted = True, list(mine.keys)
            try:
                found = await asyncio.gather(*map(self._read, wanted))
                mine.values = dict(zip(wanted, found, strict=True))
            finally:
                self._is_reading = False
                self._end.set()
                self._end.clear()
        return mine.values


log = structlog.get_logger()

RETRY_MIN_S, RETRY_MAX_S = 1.0, 10.0
"""Default first and longest wait between two tries. Each wait is twice the one before."""


async def until_answered(
    call: Callable[[], Awaitable[T]],
    *,
    event: str,
    clock: Clock,
    errors: type[BookmenderError] | tuple[type[BookmenderError], ...] = UnavailableError,
    retry_min_s: float = RETRY_MIN_S,
    retry_max_s: float = RETRY_MAX_S,
    **fields: object,
) -> T:
    """Repeat ``call``, a read or a write that may safely happen twice, until it succeeds. Returns
    its result. ``errors``: errors after which it is repeated; each is logged as ``event`` with
    ``fields``."""
    retry_s = retry_min_s
    while True:
        try:
            return await call()
        except errors as error:
            log.warning(event, error=str(error), retry_s=retry_s, **fields)
        await clock.sleep(retry_s)
        retry_s = min(2 * retry_s, retry_max_s)


class Watching(Changing):
    """Base of objects that read a value again whenever it may have changed. A failed read is
    repeated and changes nothing: unreadable is never "gone" (rule S8). The first of a series is
    logged."""

    def __init__(
        self,
        clock: Clock,
        *,
        errors: type[BookmenderError] = UnavailableError,
        retry_s: float = RETRY_MIN_S,
    ) -> None:
        """``errors``: what counts as a failed read. ``retry_s``: pause after a failed read."""
        super().__init__()
        self._clock, self._errors, self._retry_s = clock, errors, retry_s
        self._is_failing = False

    async def _follow(
        self, changes: AsyncGenerator[object, None], read: Callable[[], Awaitable[object]]
    ) -> None:
        """Read at each change until that succeeds. Ends with the changes."""
        async with aclosing(changes):
            async for _ in changes:
                while not await self._try(read):
                    await self._clock.sleep(self._retry_s)

    async def _try(self, read: Callable[[], Awaitable[object]]) -> bool:
        """Read once. Returns False if that failed."""
        try:
            await read()
        except SessionLostError:
            raise
        except self._errors as error:
            self._note_failure(error)
            return False
        if self._is_failing:
            self._is_failing = False
            self._log_success()
        return True

    def _note_failure(self, error: BookmenderError) -> None:
        if not self._is_failing:
            self._is_failing = True
            self._log_failure(error)

    def _log_failure(self, error: BookmenderError) -> None:
        """Log the first failure of a series."""
        raise NotImplementedError

    def _log_success(self) -> None:
        """Log the end of a series of failures."""


ENTRIES_MAX = 64
BYTES_MAX = 8 * 1024 * 1024


async def read_ahead(
    entry_ids: Iterable[int],
    read: Callable[[int], Awaitable[bytes | None]],
    *,
    entries_max: int = ENTRIES_MAX,
    bytes_max: int = BYTES_MAX,
) -> AsyncGenerator[bytes, None]:
    """Yield the results of ``read`` for these ids, in order, until it returns None or raises.

    A failed read counts only in its turn. The number in flight grows as in TCP's slow start: two at
    first, one more with each entry, up to a limit in entries and in bytes. So the tail of an
    abandoned ledger costs few reads beyond its end. Use it within ``aclosing``, which ends reads in
    flight.
    """
    remaining = iter(entry_ids)
    # Not a TaskGroup, which must not stay open across a yield, because another task may close the
    # generator. The ``finally`` below does its work.
    flying: deque[asyncio.Future[bytes | None]] = deque()
    window, largest_bytes = 2, 1
    try:
        while True:
            while len(flying) < min(window, max(1, bytes_max // largest_bytes)):
                entry_id = next(remaining, None)
                if entry_id is None:
                    break
                flying.append(asyncio.ensure_future(read(entry_id)))
            if not flying:
                return
            entry = await flying[0]
            flying.popleft()
            if entry is None:
                return
            window = min(window + 1, entries_max)
            largest_bytes = max(largest_bytes, len(entry))
            yield entry
    finally:
        for future in flying:
            future.cancel()
        await asyncio.gather(*flying, return_exceptions=True)


async def in_daemon_thread(call: Callable[[], T], *, name: str | None = None) -> T:
    """Run ``call`` in a daemon thread and return its result. Neither the loop nor the process waits
    for the thread at its end: for calls that may hang. Raises LocalLimitError if none can be
    started."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # cancelled
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise LocalLimitError.of(error) or error from error
    return await done
