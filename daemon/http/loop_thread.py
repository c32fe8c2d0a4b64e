"""A thread with an event loop of its own, for work that would block the loop of the requests.

Reading a queue of 100,000 marks takes seconds of CPU, in parts of up to 0.3 s. In the loop of the
requests each part would delay ``/metrics`` and ``/healthz``, too. Beside it, Python switches
between the two threads every few milliseconds.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other loops."""

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
