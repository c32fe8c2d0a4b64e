"""How many requests may be in flight, as ZooKeeper's latency has it.

The rule of thumb is that of congestion control: halve it while answers are slow, else let it grow,
by a little, and only while it is what holds us back. Slow means far above the best that was seen
lately: a server that is a continent away is no overloaded one. And it takes more than a moment to
be slow, as a window that is full of requests makes itself wait even at a server that has nothing
else to do.
"""

import math

REQUESTS_MIN, REQUESTS_FIRST, REQUESTS_MAX = 4, 64, 500
"""At least, at first, at most. The least keeps taking, repairing and giving back going."""
GROWTH = 1 / 16
"""Share by which the window grows after a round without a slow answer."""
SLOW_MIN_S = 0.05
SLOW_TIMES = 8
"""An answer is slow when it took so many times the best, and never below ``SLOW_MIN_S``."""
ROUND_MIN = 8
"""Answers that are judged together at least: one late answer is chance."""
BEST_PERIOD_S = 300.0
"""The best is that of one to two such periods: what ZooKeeper was able to before it moved is no
measure."""


class RequestWindow:
    """Told what is sent and answered, it says whether more may be sent. Times are monotonic
    seconds."""

    def __init__(self) -> None:
        self.size = REQUESTS_FIRST
        self.in_flight = 0
        """May exceed ``size`` after that was lowered, until they are answered."""
        self._best = _RecentBest()
        self._passed_over = 0
        """Answers still to come to what was sent before the window was halved: they are as slow as
        those for which it was, and must not count twice. ZooKeeper answers in order."""
        self._was_full = False
        self._answered = self._slow = 0

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self.size

    @property
    def slow_s(self) -> float:
        """What takes longer than this is slow."""
        return max(SLOW_MIN_S, SLOW_TIMES * self._best.latency_s)

    def sent(self) -> None:
        self.in_flight += 1
        self._was_full |= self.is_full

    def unanswered(self) -> None:
        """The connection broke: that says nothing of the server's load."""
        self.in_flight -= 1
        self._passed_over = max(0, self._passed_over - 1)
        assert self.in_flight >= 0, self.in_flight

    def answered(self, latency_s: float, *, now_s: float) -> None:
        """``latency_s``: infinite when the server answered that it is overloaded."""
        self.in_flight -= 1
        assert self.in_flight >= 0, self.in_flight
        self._best.learn(latency_s, now_s=now_s)
        if self._passed_over:
            self._passed_over -= 1
            return
        self._answered += 1
        self._slow += latency_s > self.slow_s
        if self._answered >= max(ROUND_MIN, self.size):
            self._judge_round()

    def _judge_round(self) -> None:
        if 2 * self._slow > self._answered:
            self.size = max(REQUESTS_MIN, self.size // 2)
            self._passed_over = self.in_flight
        elif self._was_full and not self._slow:
            self.size = min(REQUESTS_MAX, self.size + max(1, int(self.size * GROWTH)))
        self._answered = self._slow = 0
        self._was_full = self.is_full


class _RecentBest:
    """The shortest latency of this period and the one before it."""

    def __init__(self) -> None:
        self._now_s = self._before_s = math.inf
        self._period_end_s = -math.inf

    @property
    def latency_s(self) -> float:
        """Infinite before the first."""
        return min(self._now_s, self._before_s)

    def learn(self, latency_s: float, *, now_s: float) -> None:
        if now_s >= self._period_end_s:
            self._before_s, self._now_s = self._now_s, math.inf
            self._period_end_s = now_s + BEST_PERIOD_S
        self._now_s = min(self._now_s, latency_s)
