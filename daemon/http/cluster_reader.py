"""Reads the cluster's state from ZooKeeper for all requests together, in a session of its own.

Many requests cost the cluster as little as one:

1. One task reads. Requests for what is being read wait for the same reading.
2. A reading is served for ``AGE_S``, or for ten times as long as it took if that is longer. So even
   readings of a very long queue take at most a tenth of the time.
3. While ZooKeeper is silent nothing is served: requests fail with the cause, and with the time of
   the last reading.
4. The session is opened by the first request, and closed after ``IDLE_S`` without any.

A request that gives up does not stop the reading: the next request gets it. The session belongs to
another thread (``LoopThread``), and answers are made in threads, because both take long while the
queue is long. Only a request that must wait for a reading waits for that thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import structlog
import uvloop

from daemon.admin_session import AdminSession
from daemon.zookeeper import wait_silent, why_silent
from ledgers.clock import SystemClock
from ledgers.errors import BookmenderError, SessionLostError, UnavailableError
from ledgers.store import MetadataStore, SessionState
from ledgers.tasks import in_daemon_thread

log = structlog.get_logger()

T = TypeVar("T")

AGE_S = 2.0
AGE_FACTOR = 10.0
"""A reading is served for this many times as long as it took."""
READ_S = 120.0
"""Time limit of one reading."""
IDLE_S = 300.0
PENDING_MAX = 16
"""Readings that may wait at a time."""

Read = Callable[[AdminSession], Coroutine[Any, Any, Any]]
OpenCluster = Callable[[], AbstractAsyncContextManager[AdminSession]]


class NotReadError(UnavailableError):
    """The cluster cannot be read. ``taken_ms``: when it was last; None if it was not."""

    def __init__(self, error: BookmenderError, *, taken_ms: int | None) -> None:
        super().__init__(str(error))
        self.taken_ms = taken_ms


class OnThread(Protocol):
    """Runs a coroutine, perhaps in the loop of another thread, and returns its result."""

    async def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


async def in_this_loop(work: Coroutine[Any, Any, T], /) -> T:
    return await work


@dataclass(slots=True, kw_only=True)
class Reading:
    """A value that was read, and the encoded answers that contain it.

    ``until_s``: monotonic time until which it is served.
    """

    value: Any
    until_s: float
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
        """Written in the loop of ``on_thread``, as all below. The loop of the requests looks up."""
        self._taken_ms: dict[str, int] = {}
        self._store: MetadataStore | None = None
        self._pending: dict[str, asyncio.Future[Reading]] = {}
        """What requests wait for. A reading that is not here any more began before a change."""
        self._wanted: asyncio.Queue[tuple[str, Read, asyncio.Future[Reading]]] = asyncio.Queue()

    async def read(self, name: str, read: Read) -> Reading:
        """Return a recent result of ``read``. ``name``: the same for the same reading.

        Raises NotReadError, also if too much else waits; and what ``read`` raises.
        """
        if (recent := self._recent(name)) is not None:
            return recent
        try:
            return await self.on_thread(self._read(name, read))
        except (UnavailableError, SessionLostError) as error:
            raise NotReadError(error, taken_ms=self._taken_ms.get(name)) from error

    def _recent(self, name: str) -> Reading | None:
        reading, store = self._readings.get(name), self._store
        is_recent = reading is not None and time.monotonic() < reading.until_s
        return reading if is_recent and store is not None and not store.is_silent else None

    async def _read(self, name: str, read: Read) -> Reading:
        if (recent := self._recent(name)) is not None:
            return recent
        if (future := self._pending.get(name)) is None:
            if self._wanted.qsize() >= PENDING_MAX:
                raise UnavailableError("too many different requests wait. Try again later")
            future = self._pending[name] = asyncio.get_running_loop().create_future()
            # The requests that wait may all give up, and nobody sees the error then.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._wanted.put_nowait((name, read, future))
        return await asyncio.shield(future)

    def forget(self) -> None:
        """Forget all readings, because this node has changed the cluster. Call it ``on_thread``.

        A reading in progress is for requests from before the change only.
        """
        self._readings.clear()
        self._pending.clear()

    async def run(self) -> None:
        """Read what is wanted, until cancelled."""
        await self.on_thread(self._run())

    async def _run(self) -> None:
        while True:
            wanted = await self._wanted.get()
            try:
                async with self._open_cluster() as cluster:
                    self._store = cluster.store
                    while True:
                        await self._settle(*wanted, cluster)
                        try:
                            async with asyncio.timeout(IDLE_S):
                                wanted = await self._wanted.get()
                        except TimeoutError:
                            self._readings.clear()  # frees the memory
                            break
                        if cluster.store.state is SessionState.LOST:
                            self._wanted.put_nowait(wanted)  # for the next session
                            break
            except BookmenderError as error:
                self._refuse_all(error, wanted)
            except Exception as error:  # a defect in a reading must not end the server
                log.exception("http.read_crashed", reading=wanted[0])
                told = UnavailableError(f"the cluster could not be read: {error!r}")
                self._refuse_all(told, wanted)

    async def _settle(
        self, name: str, read: Read, future: asyncio.Future[Reading], cluster: AdminSession
    ) -> None:
        """Read, and hand the result or the error to the waiting requests."""
        began_s = time.monotonic()
        cluster = self._current(cluster)
        error: BookmenderError | None = None
        try:
            async with asyncio.timeout(READ_S):
                value = await answered(read(cluster), cluster)
        except TimeoutError:
            error = UnavailableError("the cluster could not be read in time")
        except BookmenderError as refused:
            error = refused
        is_current = self._pending.get(name) is future
        if is_current:
            del self._pending[name]
        if error is not None:
            future.set_exception(error)
            return
        now_s, self._taken_ms[name] = time.monotonic(), SystemClock().wall_ms()
        until_s = now_s + max(AGE_S, AGE_FACTOR * (now_s - began_s))
        reading = Reading(value=value, until_s=until_s)
        if is_current:
            self._readings[name] = reading
        future.set_result(reading)

    def _refuse_all(
        self, error: BookmenderError, wanted: tuple[str, Read, asyncio.Future[Reading]]
    ) -> None:
        """Fail everything that waits: no session can be opened, or a reading crashed."""
        self._pending.clear()
        waiting = [wanted]
        while not self._wanted.empty():
            waiting.append(self._wanted.get_nowait())
        for _, _, future in waiting:
            if not future.done():
                future.set_exception(error)


async def answered(reading: Coroutine[Any, Any, T], cluster: AdminSession) -> T:
    """Return the result of the reading. When ZooKeeper is silent, end it and raise the cause."""
    tasks = asyncio.ensure_future(reading), asyncio.ensure_future(wait_silent(cluster.store))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise await why_silent(cluster.settings)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LoopThread:
    """A thread with an event loop of its own, for work that would block the loop of the requests.

    Reading a queue of 100,000 marks takes seconds of CPU, in parts of up to 0.3 s. In the loop of
    the requests each part would delay ``/metrics`` and ``/healthz``, too. Beside it, Python
    switches between the two threads every few milliseconds.
    """

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._is_stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, timeout_s: float) -> bool:
        """Cancel what runs, end the thread, and return True if it ended in time."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_stopping.set)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the thread and return its result. If this call is cancelled, so is
        the coroutine, whose clean-up may go on after this call."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _run(self) -> None:
        async def wait() -> None:
            await self._is_stopping.wait()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(wait())
