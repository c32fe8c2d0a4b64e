"""A rate limit. The caller passes the time in and does the waiting."""

BURST_S = 0.1
"""Requests that were not sent in this time may be sent at once."""


class Pace:
    """Allows ``per_s`` requests a second; 0: no limit. Times are monotonic seconds.

    A burst may have one request more than ``BURST_S`` allows at this rate.
    """

    def __init__(self, per_s: int = 0) -> None:
        assert per_s >= 0, per_s
        self._per_s = per_s
        self._due_s = 0.0
        """When the next request is due if requests are spaced evenly."""

    @property
    def per_s(self) -> int:
        return self._per_s

    @per_s.setter
    def per_s(self, per_s: int) -> None:
        assert per_s >= 0, per_s
        if per_s != self._per_s:
            self._per_s = per_s
            self._due_s = 0.0  # a delay owed at the old rate is not owed at the new one

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next request may be sent; 0: now."""
        if self._per_s == 0:
            return 0.0
        return max(0.0, self._due_s - BURST_S - now_s)

    def took(self, now_s: float) -> None:
        """Count a request that is sent now."""
        if self._per_s:
            self._due_s = max(self._due_s, now_s) + 1 / self._per_s
