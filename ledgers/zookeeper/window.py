"""The limit on requests in flight, which adapts to ZooKeeper's latency.

It works like congestion control: halve the window while replies are slow, else grow it a little,
and only if it was full. A reply is slow if it took far longer than the best recent latency, because
a distant server is not an overloaded one. It must also exceed ``SLOW_MIN_S``: a full window delays
its own requests, even at an idle server.
"""

import math

REQUESTS_MIN, REQUESTS_FIRST, REQUESTS_MAX = 4, 64, 500
"""Smallest, initial and largest window. The smallest still lets a worker lease, repair and release
ledgers."""
GROWTH = 1 / 16
"""Share by which the window grows after a round without slow replies."""
SLOW_MIN_S = 0.05
SLOW_TIMES = 8
"""A reply is slow if its latency exceeds ``SLOW_TIMES`` times the best, and ``SLOW_MIN_S``."""
ROUND_MIN = 8
"""Smallest number of replies in a round. A single late reply may be chance."""
BEST_PERIOD_S = 300.0
"""The best latency covers the last one to two of these periods. An older one no longer applies, for
example after ZooKeeper moved to other hosts."""


class RequestWindow:
    """Counts the requests in flight and adapts their limit. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.size = REQUESTS_FIRST
        self.in_flight = 0
        """May exceed ``size`` for a while after ``size`` was lowered."""
        self._best = _RecentBest()
        self._passed_over = 0
        """Number of coming replies that are not judged: replies to requests sent before the window
        was halved. They are slow for the same reason, which must not count twice. ZooKeeper replies
        in order, so these are the next ones."""
        self._was_full = False
        self._answered = self._slow = 0

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self.size

    @property
    def slow_s(self) -> float:
        """Replies that took longer are slow."""
        return max(SLOW_MIN_S, SLOW_TIMES * self._best.latency_s)

    def sent(self) -> None:
        self.in_flight += 1
        self._was_full |= self.is_full

    def unanswered(self) -> None:
        """Count a request whose connection broke. This says nothing about the server's load."""
        self.in_flight -= 1
        self._passed_over = max(0, self._passed_over - 1)
        assert self.in_flight >= 0, self.in_flight

    def answered(self, latency_s: float, *, now_s: float) -> None:
        """Count a reply. ``latency_s``: infinite if the server replied that it is overloaded."""
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
        """Infinite before the first reply."""
        return min(self._now_s, self._before_s)

    def learn(self, latency_s: float, *, now_s: float) -> None:
        if now_s >= self._period_end_s:
            self._before_s, self._now_s = self._now_s, math.inf
            self._period_end_s = now_s + BEST_PERIOD_S
        self._now_s = min(self._now_s, latency_s)
