"""When a check is due: from the time of its last run, which a znode keeps, for Java's auditor as
well.

No clock, no store: values in, values out. Times that end in ``_ms`` are wall-clock milliseconds, as
they stand in the znodes, which outlive leaders; those in ``_s`` are elapsed time. Source:
BookKeeper's Auditor, scheduleCheckAllLedgersTask and its siblings.
"""

from dataclasses import dataclass
from math import inf

FORCED_MS = 0
"""Written as the time of the last run: somebody wants the check now. To Java it is a run long
ago."""


def due_in_s(last_ms: int | None, *, interval_s: float, now_ms: int) -> float | None:
    """Seconds until a check is due; negative: for so long it has been. None: never.

    ``last_ms``: None where it never ran. ``interval_s`` of 0: only when it is asked for. A last run
    in the future (the clock was set back) counts as one of this moment.
    """
    if last_ms == FORCED_MS:
        return -inf
    if interval_s == 0:
        return None
    if last_ms is None:
        return -inf
    age_s = max(0, now_ms - last_ms) / 1000
    return interval_s - age_s


def is_taken_back(before_ms: int | None, last_ms: int | None) -> bool:
    """Whether the time of the last run went backwards: somebody wants the check now.

    As ``bookkeeper shell forceauditchecks`` does, by 21 days; Java's auditor itself looks at these
    times when it starts, and never again.
    """
    return before_ms is not None and (last_ms is None or last_ms < before_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """``due_s``: elapsed time, perhaps of the past; None: never. ``last_ms``: what it follows
    from."""

    last_ms: int | None
    due_s: float | None


class Timetable:
    """What one leader knows of when its checks are due.

    The wall clock is looked at once for each run that became known: from then on elapsed time
    decides, so that a clock which is set back later puts nothing off.
    """

    def __init__(self) -> None:
        self._due: dict[str, Due] = {}

    def note(
        self,
        name: str,
        last_ms: int | None,
        *,
        interval_s: float,
        now_s: float,
        now_ms: int,
        is_unfinished: bool = False,
    ) -> None:
        """What the znode says now. ``is_unfinished``: an earlier leader left a run that goes on at
        once."""
        known = self._due.get(name)
        if known is not None and known.last_ms == last_ms:
            return
        wait_s = due_in_s(last_ms, interval_s=interval_s, now_ms=now_ms)
        is_resumed = known is None and is_unfinished and interval_s > 0
        if is_resumed or (known is not None and is_taken_back(known.last_ms, last_ms)):
            wait_s = -inf
        self._due[name] = Due(last_ms=last_ms, due_s=None if wait_s is None else now_s + wait_s)

    def forget(self, name: str) -> None:
        """It was run: the time that is written then is no wish, even if it is an earlier one."""
        self._due.pop(name, None)

    def next(self) -> tuple[str, float] | None:
        """The check that is due first, and when; of equals the one noted first. None: none ever
        is."""
        dues = [(name, due.due_s) for name, due in self._due.items() if due.due_s is not None]
        return min(dues, key=lambda each: each[1], default=None)
