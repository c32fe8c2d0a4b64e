"""The interface of time. The daemon uses the system clock; tests and simulations use their own."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time for decisions. Wall-clock time for people and for znodes that Java reads."""

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary start."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, as BookKeeper stores them."""

    async def sleep(self, duration_s: float) -> None: ...


class SystemClock:
    """The clock of the host."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
