"""An event loop whose time passes by itself, and at once, whenever every task waits for it.

Time-outs, hedges and delays so keep their order and cost nothing, and a test that hangs fails at
once instead of waiting.
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
    """No timer fires early, as on other loops: who waits for the rest would, where time stands
    still, for ever."""

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
    """Instead of waiting for sockets, of which there are none, it moves the time on."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("every task waits, and nothing is to come")
        self._loop.pass_by(timeout)
        return super().select(0)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
