"""The queue of requests to ZooKeeper. It keeps their order, limits their rate and joins reads.

Many ledgers are repaired at a time, and each repair reads a mark and metadata. Without joining,
these reads would be most of the load that a repair puts on ZooKeeper. kazoo's pings do not pass
through this queue, so a long queue does not endanger the session.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from kazoo.exceptions import (
    ConnectionLoss,
    SessionExpiredError,
    ThrottledOpError,
    UnimplementedError,
)
from kazoo.protocol.serialization import GetData

from ledgers.errors import BookmenderError
from ledgers.store import SessionState
from ledgers.zookeeper.kazoo_multi_read import MultiRead
from ledgers.zookeeper.kazoo_session import OnReply, resolve
from ledgers.zookeeper.pace import Pace
from ledgers.zookeeper.window import RequestWindow

READS_MAX = 50
"""Largest number of reads joined into one request. Its reply holds as many ledgers' metadata."""

Waiting = tuple[Any, "asyncio.Future[Any]"]
"""A request and the future of its reply."""


class Sender(Protocol):
    """The part of ``KazooSession`` that an outbox uses."""

    on_not_suspended: Callable[[], None]

    @property
    def state(self) -> SessionState: ...

    def send(self, request: Any, on_reply: OnReply) -> None: ...


class Outbox:
    """Sends requests on a session in their order, as the window and the rate limit allow.

    Consecutive waiting reads are joined: the reads of one turn of the loop, and more if they wait
    longer. A server that does not support this (before 3.6) gets them one by one. All requests wait
    while the session is suspended. The queue has no limit of its own: each request has a caller
    that awaits it, so the number of callers is the limit.
    """

    def __init__(self, session: Sender, *, can_join: bool = True) -> None:
        self._session = session
        session.on_not_suspended = self._send_all
        self._window = RequestWindow()
        self._pace = Pace()
        self._waiting: deque[Waiting] = deque()
        self._alarm: asyncio.Handle | None = None
        """The scheduled call of ``_send_all``. None if nothing waits, or if a reply or a new state
        of the session will trigger the next call."""
        self._can_join = can_join

    @property
    def requests_per_s(self) -> int:
        """Rate limit of requests; 0: no limit. May be changed at any time."""
        return self._pace.per_s

    @requests_per_s.setter
    def requests_per_s(self, per_s: int) -> None:
        self._pace.per_s = per_s
        self._send_all()

    def ask(self, request: Any) -> "asyncio.Future[Any]":
        """Queue a request and return the future of its reply. Unlike ``KazooSession.ask``, a lost
        session also fails the future."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._send_in(0)
        return future

    def _send_in(self, delay_s: float) -> None:
        if self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = (
                loop.call_later(delay_s, self._send_all)
                if delay_s
                else loop.call_soon(self._send_all)
            )

    def _send_all(self) -> None:
        """Send all requests that may be sent now."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self._waiting and self._may_send():
            if group := self._next_group():
                self._send(group)

    def _may_send(self) -> bool:
        if self._session.state is not SessionState.CONNECTED:
            return self._session.state is SessionState.LOST  # then ``send`` raises
        if self._window.is_full:
            return False
        wait_s = self._pace.wait_s(asyncio.get_running_loop().time())
        if wait_s:
            self._send_in(wait_s)
        return not wait_s

    def _next_group(self) -> list[Waiting]:
        """Remove and return the first waiting request. If it is a read, also the reads that follow
        it. Empty if no request waits."""
        group: list[Waiting] = []
        are_reads = False
        while self._waiting and len(group) < READS_MAX:
            request, future = self._waiting[0]
            if not future.done():  # else the caller was cancelled
                if group and not (are_reads and isinstance(request, GetData)):
                    break
                are_reads = self._can_join and isinstance(request, GetData)
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
            self._pace.took(asyncio.get_running_loop().time())

    def _answered(
        self,
        on_reply: Callable[[Any, BaseException | None], None],
        value: Any,
        error: BaseException | None,
        latency_s: float,
    ) -> None:
        if isinstance(error, _NO_ANSWER):
            self._window.unanswered()
        else:
            if isinstance(error, ThrottledOpError):
                latency_s = math.inf
            self._window.answered(latency_s, now_s=asyncio.get_running_loop().time())
        on_reply(value, error)
        if self._waiting:
            self._send_in(0)

    def _hand_out(
        self, reads: Sequence[Waiting], parts: Sequence[Any], error: BaseException | None
    ) -> None:
        if isinstance(error, UnimplementedError):
            self._can_join = False
            self._waiting.extendleft(reversed(reads))
        elif error is not None:
            for _, future in reads:
                resolve(future, None, error)
        else:
            for (_, future), part in zip(reads, parts, strict=True):
                resolve(future, part, part if isinstance(part, Exception) else None)


_NO_ANSWER = (ConnectionLoss, SessionExpiredError, BookmenderError)
"""Errors of requests that the server did not answer. Their latency is not measured."""
