"""An event loop with virtual time: when every task waits, time jumps to the next timer.

Timeouts, hedges and delays keep their order and cost nothing. A test that hangs fails at once.
"""

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopClock:
    """A ``Clock`` on the running loop's time."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + int(self.now_s() * 1000)

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop in which no timer fires early, unlike other loops.

    A task that waits for the rest of an early timer would wait for ever, because time would not
    advance.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jumping(self))
        self.pass_by(0.0)

    def time(self) -> float:
        return self.now_s

    def pass_by(self, duration_s: float) -> None:
        self.now_s += duration_s
        self._clock_resolution = math.ulp(self.now_s)


class _Jumping(selectors.SelectSelector):
    """A selector that advances the time instead of waiting for sockets. There are none."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("every task waits, and nothing is to come")
        self._loop.pass_by(timeout)
        return super().select(0)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in virtual time, like ``asyncio.run``."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
