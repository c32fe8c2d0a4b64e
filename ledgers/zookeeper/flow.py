"""The queue of requests to ZooKeeper. It keeps their order, limits their rate and joins reads.

``Outbox`` is the queue. Many ledgers are repaired at a time, and each repair reads a mark and
metadata. Without joining, these reads would be most of the load that a repair puts on ZooKeeper.
kazoo's pings do not pass through this queue, so a long queue does not endanger the session. A
caller that can wait, such as the reading of changed ledgers, gives way to all others, which may be
about marks.

Two limits apply: ``RequestRate``, which the operator sets, and ``RequestWindow``, which adapts the
number of requests in flight to ZooKeeper's latency. The window works like congestion control: it is
halved while replies are slow, and else grows a little if it was full. A reply is slow if it took
far longer than the best recent latency, because a distant server is not an overloaded one. It must
also exceed ``SLOW_MIN_S``, because a full window delays its own requests even at an idle server.

Not here: the session and its thread (``kazoo_session``), and retries (``store``).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kazoo.exceptions import ConnectionLoss, SessionExpiredError, ThrottledOpError
from kazoo.protocol.serialization import GetData
from prometheus_client import Counter, Histogram

from ledgers.errors import BookmenderError
from ledgers.store import SessionState
from ledgers.zookeeper.kazoo_internals import MultiRead
from ledgers.zookeeper.kazoo_session import OnReply, resolve

REQUEST_S = Histogram(
    "bookmender_zookeeper_request_seconds",
    "Time from sending a request to ZooKeeper until its reply. A transaction is one request, and "
    "so are reads that were joined.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
)
UNANSWERED = Counter(
    "bookmender_zookeeper_unanswered_requests_total",
    "Requests to ZooKeeper whose connection or session broke before the reply.",
)

BURST_S = 0.1
"""Requests that were not sent in this time may be sent at once."""
REQUESTS_MIN, REQUESTS_FIRST, REQUESTS_MAX = 4, 64, 500
"""Smallest, first and largest window. The smallest still lets a worker repair ledgers."""
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
GIVE_WAY_MAX_S = 0.02
"""Longest time for which a caller gives way to the requests of others, which may never end."""
READS_MAX = 50
"""Largest number of reads joined into one request. Its reply holds as many ledgers' metadata."""

_NO_ANSWER = (ConnectionLoss, SessionExpiredError, BookmenderError)
"""Errors of requests that the server did not answer. Their latency is not measured."""

Waiting = tuple[Any, "asyncio.Future[Any]"]
"""A request and the future of its reply."""


class Outbox:
    """Sends requests on a session in their order, as the window and the rate limit allow.

    Consecutive waiting reads are joined: the reads of one turn of the loop, and more if they wait
    longer. All requests wait while the session is suspended. The queue has no limit of its own:
    each request has a caller that awaits it, so the number of callers is the limit.
    """

    def __init__(self, session: Sender) -> None:
        self._session = session
        session.on_not_suspended = self._send_all
        self._window = RequestWindow()
        self._rate = RequestRate()
        self._waiting: deque[Waiting] = deque()
        self._is_idle = asyncio.Event()
        """Set while no request waits or is in flight."""
        self._is_idle.set()
        self._alarm: asyncio.Handle | None = None
        """The scheduled call of ``_send_all``. None if nothing waits, or if a reply or a new state
        of the session will trigger the next call."""

    @property
    def usage(self) -> RequestUsage:
        """Return how much of its limits this queue uses now. May be read on any thread."""
        return RequestUsage(
            waiting_count=len(self._waiting),
            in_flight_count=self._window.in_flight,
            in_flight_max=self._window.size,
            per_s_max=self._rate.per_s,
        )

    @property
    def requests_per_s(self) -> int:
        """Rate limit of requests; 0: no limit. May be changed at any time. A transaction counts as
        one request, and so do reads that were joined."""
        return self._rate.per_s

    @requests_per_s.setter
    def requests_per_s(self, per_s: int) -> None:
        self._rate.per_s = per_s
        self._send_all()

    def ask(self, request: Any) -> asyncio.Future[Any]:
        """Queue a request and return the future of its reply, which a lost session fails."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._is_idle.clear()
        self._send_in(0)
        return future

    async def give_way(self) -> None:
        """Return when no request waits or is in flight, or after ``GIVE_WAY_MAX_S``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_WAY_MAX_S):
                await self._is_idle.wait()

    def _send_in(self, delay_s: float) -> None:
        if self._alarm is None:
            loop, send_all = asyncio.get_running_loop(), self._send_all
            self._alarm = (
                loop.call_later(delay_s, send_all) if delay_s else loop.call_soon(send_all)
            )

    def _send_all(self) -> None:
        """Send all requests that may be sent now."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self._waiting and self._may_send():
            if group := self._next_group():
                self._send(group)
        if not (self._waiting or self._window.in_flight):  # their callers were cancelled
            self._is_idle.set()

    def _may_send(self) -> bool:
        if self._session.state is not SessionState.CONNECTED:
            return self._session.state is SessionState.LOST  # then ``send`` raises
        if self._window.is_full:
            return False
        wait_s = self._rate.wait_s(asyncio.get_running_loop().time())
        if wait_s:
            self._send_in(wait_s)
        return not wait_s

    def _next_group(self) -> list[Waiting]:
        """Remove and return the first waiting request, and reads that follow a read."""
        group: list[Waiting] = []
        are_reads = False
        while self._waiting and len(group) < READS_MAX:
            request, future = self._waiting[0]
            if not future.done():  # else the caller was cancelled
                if group and not (are_reads and isinstance(request, GetData)):
                    break
                are_reads = isinstance(request, GetData)
                group.append((request, future))
            self._waiting.popleft()
        return group

    def _send(self, group: Sequence[Waiting]) -> None:
        request, on_reply = group[0][0], partial(resolve, group[0][1])
        if len(group) > 1:
            request = MultiRead([read.path for read, _ in group])
            on_reply = partial(self._hand_out, group)
        try:
            self._session.send(request, partial(self._answered, on_reply))
        except BookmenderError as error:  # the session was lost since ``ask``
            on_reply(None, error)
        else:
            self._window.sent()
            self._rate.took(asyncio.get_running_loop().time())

    def _answered(
        self,
        on_reply: Callable[[Any, BaseException | None], None],
        value: Any,
        error: BaseException | None,
        latency_s: float,
    ) -> None:
        if isinstance(error, _NO_ANSWER):
            self._window.unanswered()
            UNANSWERED.inc()
        else:
            REQUEST_S.observe(latency_s)
            if isinstance(error, ThrottledOpError):
                latency_s = math.inf
            self._window.answered(latency_s, now_s=asyncio.get_running_loop().time())
        on_reply(value, error)
        if self._waiting:
            self._send_in(0)
        elif not self._window.in_flight:
            self._is_idle.set()

    def _hand_out(
        self, reads: Sequence[Waiting], parts: Sequence[Any], error: BaseException | None
    ) -> None:
        if error is not None:
            for _, future in reads:
                resolve(future, None, error)
        else:
            for (_, future), part in zip(reads, parts, strict=True):
                resolve(future, part, part if isinstance(part, Exception) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUsage:
    """The requests of one session. ``in_flight_max``: the window. ``per_s_max``: 0: none."""

    waiting_count: int
    in_flight_count: int
    in_flight_max: int
    per_s_max: int


class Sender(Protocol):
    """The part of ``KazooSession`` that an outbox uses."""

    on_not_suspended: Callable[[], None]

    @property
    def state(self) -> SessionState: ...

    def send(self, request: Any, on_reply: OnReply) -> None: ...


class RequestWindow:
    """Counts the requests in flight and adapts their limit. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.size = REQUESTS_FIRST
        self.in_flight = 0
        """May exceed ``size`` for a while after ``size`` was lowered."""
        self._best_s = self._best_before_s = math.inf
        """The shortest latency of this period, and of the one before it."""
        self._period_end_s = -math.inf
        self._passed_over = 0
        """Number of coming replies that are not judged: to requests sent before the window was
        halved. They are slow for the same reason. ZooKeeper replies in order, so they are the next
        ones."""
        self._was_full = False
        self._answered = self._slow = 0

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self.size

    @property
    def slow_s(self) -> float:
        """Replies that took longer are slow."""
        return max(SLOW_MIN_S, SLOW_TIMES * min(self._best_s, self._best_before_s))

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
        if now_s >= self._period_end_s:
            self._best_before_s, self._best_s = self._best_s, math.inf
            self._period_end_s = now_s + BEST_PERIOD_S
        self._best_s = min(self._best_s, latency_s)
        if self._passed_over:
            self._passed_over -= 1
            return
        self._answered += 1
        self._slow += latency_s > self.slow_s
        if self._answered < max(ROUND_MIN, self.size):
            return
        if 2 * self._slow > self._answered:
            self.size = max(REQUESTS_MIN, self.size // 2)
            self._passed_over = self.in_flight
        elif self._was_full and not self._slow:
            self.size = min(REQUESTS_MAX, self.size + max(1, int(self.size * GROWTH)))
        self._answered = self._slow = 0
        self._was_full = self.is_full


class RequestRate:
    """Limits the requests of a session to ``per_s`` per second; 0: no limit. After a pause, as many
    as the rate allows in ``BURST_S``, and one more, may be sent at once."""

    def __init__(self, per_s: int = 0) -> None:
        self._per_s = per_s
        self._due_s = 0.0
        """Due time of the next request if requests are spaced evenly."""

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
        return max(0.0, self._due_s - BURST_S - now_s) if self._per_s else 0.0

    def took(self, now_s: float) -> None:
        """Count a request that is sent now."""
        if self._per_s:
            self._due_s = max(self._due_s, now_s) + 1 / self._per_s
