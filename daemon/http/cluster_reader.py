"""Reads the cluster's state from ZooKeeper for all requests together, in a session of its own.

Many requests cost the cluster as little as one:

1. One task reads. Requests for what is being read wait for the same reading.
2. A reading is served for ``AGE_S``, and for ten times as long as it took. So even a reading of a
   very long queue takes at most a tenth of the time.
3. After that, the first request starts the next reading. While this takes long, or waits for
   other readings, the old one is served. So a steady client of a long queue does not wait.
4. The session is opened by the first request, and closed after ``IDLE_S`` without any.

A request that gives up does not stop the reading: the next request gets it. Sessions and readings
may run in another thread (``on_thread``), and answers are made in threads, because both take long
while the queue is long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from daemon.admin_session import AdminSession
from ledgers.errors import BookmenderError, SessionLostError, UnavailableError
from ledgers.store import SessionState
from ledgers.tasks import in_daemon_thread

log = structlog.get_logger()

T = TypeVar("T")

AGE_S = 2.0
AGE_FACTOR = 10.0
"""A reading is served for this many times as long as it took."""
LATE_FACTOR = 2.0
"""An older reading is served for this many times as long as it took, while the next one runs."""
LATE_MAX_S = 30.0
"""An older reading is served for this long while the next one waits for others."""
WAIT_S = 10.0
"""How long a request waits for a reading."""
READ_S = 120.0
"""Time limit of one reading."""
IDLE_S = 300.0
PENDING_MAX = 16
"""Different readings that may wait at a time."""

Read = Callable[[AdminSession], Awaitable[Any]]
Key = tuple[str, int]
"""The name of a reading, and how many changes there were before it was wanted."""
OpenCluster = Callable[[], AbstractAsyncContextManager[AdminSession]]


class OnThread(Protocol):
    """Runs a coroutine, perhaps in the loop of another thread, and returns its result."""

    async def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


async def in_this_loop(work: Coroutine[Any, Any, T], /) -> T:
    return await work


@dataclass(slots=True, kw_only=True)
class Reading:
    """A value that was read, and the encoded answers that contain it.

    ``until_s``: monotonic time until which it is served; until ``late_s`` only while the next
    reading runs.
    """

    value: Any
    until_s: float
    late_s: float
    _bodies: dict[str, bytes] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # guards _bodies

    async def json(self, name: str, make: Callable[[Any], Any]) -> bytes:
        """Return the JSON of ``make(value)``, which is made once for each ``name``, in a thread."""
        async with self._lock:
            if name not in self._bodies:
                self._bodies[name] = await in_daemon_thread(
                    lambda: msgspec.json.encode(make(self.value))
                )
            return self._bodies[name]


class ClusterReader:
    """Reads for the requests of one event loop. ``run`` does the work."""

    def __init__(
        self,
        open_cluster: OpenCluster,
        *,
        current: Callable[[AdminSession], AdminSession] = lambda cluster: cluster,
        on_thread: OnThread = in_this_loop,
    ) -> None:
        """``open_cluster``: opens a session. It raises BookmenderError if that is impossible.

        ``current``: returns the session with the settings in force, for each reading.
        ``on_thread``: runs what uses a session.
        """
        self.on_thread = on_thread
        self._open_cluster = open_cluster
        self._current = current
        self._readings: dict[str, Reading] = {}
        self._pending: dict[Key, asyncio.Future[Reading]] = {}
        self._wanted: asyncio.Queue[tuple[Key, Read]] = asyncio.Queue()
        self._change_count = 0

    async def read(self, name: str, read: Read) -> Reading:
        """Return a recent result of ``read``. ``name``: the same for the same reading.

        Raises UnavailableError, also if too much else waits, or if the reading takes longer than a
        request may wait; and what ``read`` raises.
        """
        reading, now_s = self._readings.get(name), time.monotonic()
        if reading is not None and now_s < reading.until_s:
            return reading
        is_busy = any(other != name for other, _ in self._pending)
        late_s = 0.0 if reading is None else reading.late_s + LATE_MAX_S * is_busy
        is_late = reading is not None and now_s < late_s
        key = name, self._change_count
        future = self._pending.get(key)
        if future is None:
            if len(self._pending) >= PENDING_MAX and not is_late:
                raise UnavailableError("too many different requests wait. Try again later")
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(_note_error)
            self._pending[key] = future
            self._wanted.put_nowait((key, read))
        if reading is not None and is_late:
            return reading
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(future)
        except TimeoutError as error:
            raise UnavailableError(
                "the state of the cluster is still being read. Try again in some seconds"
            ) from error

    def forget(self) -> None:
        """Forget all readings, because this node has changed the cluster.

        A reading in progress is for requests from before the change only.
        """
        self._readings.clear()
        self._change_count += 1

    async def run(self) -> None:
        """Read what is wanted, until cancelled."""
        while True:
            key, read = await self._wanted.get()
            try:
                async with self._session() as cluster:
                    await self._settle(key, read, cluster)
                    await self._read_until_idle(cluster)
            except BookmenderError as error:
                self._refuse_all(error)
            except Exception as error:  # a defect in a reading must not end the server
                log.exception("http.read_crashed", reading=key[0])
                self._refuse_all(UnavailableError(f"the cluster could not be read: {error!r}"))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[AdminSession]:
        opening = self._open_cluster()
        entered: list[AdminSession] = []

        async def enter() -> None:
            entered.append(await opening.__aenter__())

        try:
            await self.on_thread(enter())
            yield entered[0]
        finally:
            if entered:  # also if this task was cancelled just when the session had been opened
                await self.on_thread(_left(opening))

    async def _read_until_idle(self, cluster: AdminSession) -> None:
        while not is_lost(cluster):
            try:
                async with asyncio.timeout(IDLE_S):
                    key, read = await self._wanted.get()
            except TimeoutError:
                self._readings.clear()  # frees the memory
                return
            if is_lost(cluster):
                self._wanted.put_nowait((key, read))
                return
            await self._settle(key, read, cluster)

    async def _settle(self, key: Key, read: Read, cluster: AdminSession) -> None:
        """Read, and hand the result or the error to the waiting requests."""
        began_s = time.monotonic()
        future, (name, change_count) = self._pending[key], key
        try:
            async with asyncio.timeout(READ_S):
                value = await self.on_thread(_called(read, self._current(cluster)))
        except TimeoutError:
            error: BookmenderError = UnavailableError("the cluster could not be read in time")
        except SessionLostError as lost:
            error = UnavailableError("the ZooKeeper session of the HTTP server was lost")
            error.__cause__ = lost
        except BookmenderError as refused:
            error = refused
        else:
            now_s = time.monotonic()
            took_s = now_s - began_s
            until_s = now_s + max(AGE_S, AGE_FACTOR * took_s)
            reading = Reading(value=value, until_s=until_s, late_s=until_s + LATE_FACTOR * took_s)
            if change_count == self._change_count:
                self._readings[name] = reading
            del self._pending[key]
            future.set_result(reading)
            return
        del self._pending[key]
        future.set_exception(error)

    def _refuse_all(self, error: BookmenderError) -> None:
        """Fail everything that waits: no session can be opened, or a reading crashed."""
        while not self._wanted.empty():
            self._wanted.get_nowait()
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)


async def _left(opening: AbstractAsyncContextManager[object]) -> None:
    await opening.__aexit__(None, None, None)


async def _called(read: Read, cluster: AdminSession) -> Any:
    return await read(cluster)


def is_lost(cluster: AdminSession) -> bool:
    return cluster.store.state is SessionState.LOST


def _note_error(future: asyncio.Future[Reading]) -> None:
    """Mark the error as seen: the requests that waited for it may all have given up."""
    if not future.cancelled():
        future.exception()
