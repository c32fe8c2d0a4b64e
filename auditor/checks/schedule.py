"""When a check is due: from the time of its last run, which a znode keeps, for Java's auditor as well.

Pure. Times are wall-clock milliseconds, as they stand in the znodes, which outlive leaders and restarts.
Source: BookKeeper's Auditor#scheduleCheckAllLedgersTask and its siblings.
"""

FORCED_MS = 0
"""Written as the time of the last run: somebody wants the check now. To Java it is a run long ago."""


def due_in_s(last_ms: int | None, *, interval_s: float, now_ms: int) -> float | None:
    """Seconds until it is due, 0 where it is; None: never.

    ``last_ms``: None where it never ran. ``interval_s`` of 0: only when it is asked for. A last run in the
    future (the clock was set back) counts as one of this moment.
    """
    if last_ms == FORCED_MS:
        return 0.0
    if interval_s == 0:
        return None
    if last_ms is None:
        return 0.0
    age_s = max(0, now_ms - last_ms) / 1000
    return max(0.0, interval_s - age_s)


def is_forced(before_ms: int | None, last_ms: int | None) -> bool:
    """Whether the time of the last run was taken back: somebody wants the check now.

    As ``bookkeeper shell forceauditchecks`` does, by 21 days. Java's auditor looks at these times when
    it starts, and at no other time.
    """
    return before_ms is not None and (last_ms is None or last_ms < before_ms)
