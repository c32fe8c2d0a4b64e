"""Bookies that are registered and do not answer: left alone for a while that grows, then tried
again.

Each request to such a bookie costs whoever needs it a time-out. So the first one in vain speaks for
the rest: until the wait is over nobody asks; then one request goes out as the probe, and what
becomes of it decides. BookKeeper's client knows quarantine for bookies that fail reads, Java's
repair does not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ledgers.clock import Clock
from ledgers.metadata import BookieId

Life = Callable[[BookieId], int]
"""Tells one registration of a bookie from the next, as its czxid does; 0: it is not registered."""

WAIT_MIN_S = 10.0
"""The first wait. Each probe in vain doubles it."""
WAIT_MAX_S = 300.0


@dataclass(frozen=True, slots=True)
class Shut:
    """Of a bookie that is not to be asked now. ``until_ms``: by the wall clock, in milliseconds;
    ``reason``: why it does not answer, as far as that was told, or ""."""

    until_ms: int
    reason: str = ""


@dataclass(slots=True)
class _Stay:
    """One bookie's. Times are the clock's seconds."""

    life: int
    since_s: float
    until_s: float
    reason: str = ""
    wait_s: float = WAIT_MIN_S
    is_probed: bool = False
    """Whether the probe is under way."""


class Quarantine:
    """One for a worker, in which all its requests are counted. Asks nobody itself.

    It begins with the silence of a registered bookie, never with a refusal, and ends with an
    answer, whatever that says, or when the bookie is another one: gone, or registered anew.
    """

    def __init__(self, clock: Clock, life: Life) -> None:
        self._clock, self._life = clock, life
        self._stays: dict[BookieId, _Stay] = {}

    @property
    def is_empty(self) -> bool:
        """Whether it certainly holds nobody."""
        return not self._stays

    def holds(self, bookie: BookieId) -> bool:
        """Whether it was silent when last asked, be its wait over or not."""
        return self._stay(bookie) is not None

    def is_shut(self, bookie: BookieId) -> bool:
        """Whether it is not to be asked anything now."""
        stay = self._stay(bookie)
        return stay is not None and (stay.is_probed or self._clock.now_s() < stay.until_s)

    def shut(self) -> Mapping[BookieId, Shut]:
        """All that are not to be asked now."""
        if not self._stays:
            return {}
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        return {
            bookie: Shut(now_ms + int(max(0.0, stay.until_s - now_s) * 1000), stay.reason)
            for bookie, stay in list(self._stays.items())
            if self.is_shut(bookie)
        }

    def admits(self, bookie: BookieId) -> bool:
        """Whether to ask it now. Where its wait is over, the caller's request is the probe.

        Then ``note_answer``, ``note_silence`` or ``note_nothing`` has to follow.
        """
        if self.is_shut(bookie):
            return False
        if (stay := self._stay(bookie)) is not None:
            stay.is_probed = True
        return True

    def note_answer(self, bookie: BookieId) -> float | None:
        """It answered. For how long it had not, in seconds; None: it was in no quarantine."""
        stay = self._stays.pop(bookie, None)
        return None if stay is None else self._clock.now_s() - stay.since_s

    def note_silence(self, bookie: BookieId, reason: str = "") -> bool:
        """It did not answer, for that reason. Whether a quarantine begins.

        Requests that were on their way when it began end in vain too; only the probe makes it
        longer.
        """
        now_s, stay, life = self._clock.now_s(), self._stay(bookie), self._life(bookie)
        if stay is None and life:
            self._stays[bookie] = _Stay(life, now_s, until_s=now_s + WAIT_MIN_S, reason=reason)
            return True
        if stay is not None and reason:
            stay.reason = reason
        if stay is not None and stay.is_probed:
            stay.is_probed = False
            stay.wait_s = min(2 * stay.wait_s, WAIT_MAX_S)
            stay.until_s = now_s + stay.wait_s
        return False

    def note_nothing(self, bookie: BookieId) -> None:
        """The request was called off: the next one is the probe."""
        if (stay := self._stays.get(bookie)) is not None:
            stay.is_probed = False

    def _stay(self, bookie: BookieId) -> _Stay | None:
        """None once the bookie is another one: nothing is held against that."""
        stay = self._stays.get(bookie)
        if stay is not None and stay.life != self._life(bookie):
            del self._stays[bookie]
            return None
        return stay
