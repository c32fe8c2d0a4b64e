"""A bound on what is under way at once."""

import asyncio
from collections import deque
from types import TracebackType


class Slots:
    """As ``asyncio.Semaphore``, first come first served; waiting costs the same with many others.

    (In Python 3.11 the semaphore looks at all that wait each time that one comes or goes.)
    """

    def __init__(self, count: int) -> None:
        self._free_count = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._free_count:
            self._free_count -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was ours already: pass it on
                self._release()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    def _release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free_count += 1
