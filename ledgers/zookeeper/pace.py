"""So many requests in a second. A value of times that are passed in; who waits is others'
business."""

BURST_S = 0.1
"""What was not used in this long may be made up for at once."""


class Pace:
    """At most ``per_s`` in a second, and a burst of one more than ``BURST_S`` is worth. 0: no
    limit.

    Times are monotonic seconds.
    """

    def __init__(self, per_s: int = 0) -> None:
        assert per_s >= 0, per_s
        self._per_s = per_s
        self._due_s = 0.0
        """When the next one would be due if they came evenly."""

    @property
    def per_s(self) -> int:
        return self._per_s

    @per_s.setter
    def per_s(self, per_s: int) -> None:
        assert per_s >= 0, per_s
        if per_s != self._per_s:
            self._per_s = per_s
            self._due_s = 0.0  # what a slower pace has put off is not owed by the new one

    def wait_s(self, now_s: float) -> float:
        """How long until the next one may go; 0: now."""
        if self._per_s == 0:
            return 0.0
        return max(0.0, self._due_s - BURST_S - now_s)

    def took(self, now_s: float) -> None:
        """One went."""
        if self._per_s:
            self._due_s = max(self._due_s, now_s) + 1 / self._per_s
