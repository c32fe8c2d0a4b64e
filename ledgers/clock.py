"""Time, passed in: the daemon runs on the loop's clock, a test or a simulation on its own."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Elapsed time decides; wall-clock time is for people and for znodes that Java reads."""

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary start."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970, as BookKeeper stores them."""
        ...

    async def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    """The real one."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
