"""A history that keeps every event, with its time, in memory."""

from msgspec.structs import replace

from ledgers.clock import Clock
from replication.history import Event, History


class MemoryHistory(History):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(replace(event, at_ms=self._clock.wall_ms(), until_ms=None))
