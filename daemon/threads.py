"""A service thread: one thread with one asyncio loop that restarts its session after each failure.

The design is crash-only. When a session ends (session lost, leadership lost, or a defect), its
ephemeral znodes end with it: locks, vote and registration. A new session begins after a backoff.
The other service of the node is not affected.
"""

import asyncio
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable

import structlog

from ledgers.errors import BookmenderError

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
        # Guards _loop and _supervisor, which the thread sets and clears.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._is_stopping = threading.Event()
        self._probed_s: float | None = None
        """Monotonic time of the first probe that the loop has not answered; None: all are
        answered."""
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
    def name(self) -> str:
        return self._thread.name

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def probe(self) -> None:
        """Ask the loop to show that it runs. May be called on any thread, again and again."""
        with self._lock:
            if self._loop is not None and self._probed_s is None:
                self._probed_s = time.monotonic()
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._probed_s = None

    @property
    def silent_s(self) -> float:
        """Return for how long the loop has not answered a probe; infinite if the thread does not
        run.

        A few seconds mean that a call blocks the loop, for example one that waits for a disk. May
        be read on any thread.
        """
        probed_s = self._probed_s
        if not self.is_alive:
            return math.inf
        return 0.0 if probed_s is None else time.monotonic() - probed_s

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
            # The session may have turned its cancellation into an error.
            if self._is_stopping.is_set():
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
