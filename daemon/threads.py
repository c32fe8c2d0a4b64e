"""A service thread: one thread with one asyncio loop that restarts its session after each failure.

The design is crash-only. When a session ends (session lost, leadership lost, or a defect), its
ephemeral znodes end with it: locks, vote and registration. A new session begins after a backoff.
The other service of the node is not affected.
"""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar, cast

import structlog

from ledgers.errors import BookmenderError

T = TypeVar("T")

log = structlog.get_logger()

RESTART_MIN_S = 0.5
RESTART_MAX_S = 30.0
CALM_S = 60.0
"""A session that lasted this long resets the backoff."""


class ServiceThread:
    """Owns the thread ``name``, which runs ``session`` again and again until ``stop``."""

    def __init__(
        self,
        name: str,
        session: Callable[[], Awaitable[None]],
        *,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self._session = session
        self._loop_factory = loop_factory
        self._lock = (
            threading.Lock()
        )  # guards _loop and _supervisor, which the thread sets and clears
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._is_stopping = threading.Event()
        # daemon: a stuck session must not keep a dying process alive. Its locks and vote are
        # ephemeral.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, timeout_s: float) -> bool:
        """End the session and the thread, and return True if the thread ended in time. May be
        called repeatedly."""
        self._is_stopping.set()
        with self._lock:
            if self._loop is not None and self._supervisor is not None:
                self._loop.call_soon_threadsafe(self._supervisor.cancel)
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            try:
                runner.run(self._supervise())
            except asyncio.CancelledError:
                pass
            finally:
                with self._lock:
                    self._loop = self._supervisor = None

    async def _supervise(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._supervisor = asyncio.current_task()
        wait_s = RESTART_MIN_S
        while not self._is_stopping.is_set():
            began_s = self._loop.time()
            try:
                await self._session()
            except Exception as error:  # top of the thread: only ``stop`` may end it
                self._log_end(error)
            if (
                self._is_stopping.is_set()
            ):  # the session may have turned its cancellation into an error
                return
            if self._loop.time() - began_s > CALM_S:
                wait_s = RESTART_MIN_S
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, RESTART_MAX_S)

    def _log_end(self, error: Exception) -> None:
        causes = list(leaves(error))
        expected = [cause for cause in causes if isinstance(cause, BookmenderError)]
        if len(expected) == len(causes):
            log.warning("role.restarted", role=self._thread.name, error=str(expected[0]))
        else:
            log.error("role.crashed", role=self._thread.name, exc_info=error)


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a nested exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def own_cause(error: BaseExceptionGroup[BaseException]) -> BookmenderError | None:
    """Return the first BookmenderError in the group, which is shown to the user; None if there is
    none."""
    return next((leaf for leaf in leaves(error) if isinstance(leaf, BookmenderError)), None)


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Run ``call`` in a daemon thread and return its result.

    Unlike with ``asyncio.to_thread``, neither the loop nor the process waits for the thread at its
    end. Use it for calls that may hang, for example on a disk.
    """
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

    threading.Thread(target=run, daemon=True).start()
    return await done
