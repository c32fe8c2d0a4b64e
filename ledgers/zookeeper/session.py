"""What both stores share: a session's state, the readers of its watches, the size of requests.

All of it belongs to the store's loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ledgers.errors import RejectedError, SessionLostError
from ledgers.store import Event, EventKind, Operation, SessionState, request_bytes

REQUEST_BYTES_MAX = 1_000_000
"""The default limit on a request. Past its jute.maxbuffer, 1 MiB unless it was raised, a server
cuts the connection, and others' requests with it."""
READ_TRIES_MAX = 5
"""Connections that a read may see break before it fails; a write sees one only."""
BREAK_TOLD_MAX_S = 1.0
"""How long after the requests that it failed a break of the connection may be told."""


class Session:
    """Connected at first; suspended and resumed any number of times; once lost, lost for good."""

    def __init__(self) -> None:
        self.state = SessionState.CONNECTED
        self.break_count = 0
        """How often the connection broke: tells whether a request and its reply share one."""
        self._not_suspended = asyncio.Event()
        self._not_suspended.set()
        self._disconnected = asyncio.Event()
        self._lost = asyncio.Event()
        self._subscriptions: dict[Subscription, None] = {}
        self.on_not_suspended: Callable[[], None] = lambda: None
        """Called when it has been resumed, and when it was lost."""

    def suspend(self) -> None:
        if self.state is SessionState.CONNECTED:
            self.state = SessionState.SUSPENDED
            self.break_count += 1
            self._not_suspended.clear()
            self._disconnected.set()

    def resume(self) -> None:
        if self.state is SessionState.SUSPENDED:
            self.state = SessionState.CONNECTED
            self._not_suspended.set()
            self._disconnected.clear()
            for subscription in self._subscriptions:
                subscription.reset()
            self.on_not_suspended()

    def lose(self) -> None:
        self.break_count += 1
        self.state = SessionState.LOST
        self._not_suspended.set()
        self._disconnected.set()
        self._lost.set()
        for subscription in self._subscriptions:
            subscription.fail(session_lost())
        self.on_not_suspended()

    def raise_if_lost(self) -> None:
        if self.state is SessionState.LOST:
            raise session_lost()

    async def wait_connected(self) -> None:
        """Raises SessionLostError when it never will be again."""
        while self.state is SessionState.SUSPENDED:
            await self._not_suspended.wait()
        self.raise_if_lost()

    async def wait_disconnected(self) -> None:
        await self._disconnected.wait()

    async def wait_break_told(self, break_count: int) -> None:
        """After a request failed with its connection: wait until the session has more breaks than
        ``break_count``.

        kazoo fails the requests first and tells of the break then. A request that is sent again in
        between fails at once with the same break, as often as it is sent.
        """
        if self.break_count == break_count:
            with suppress(TimeoutError):
                async with asyncio.timeout(BREAK_TOLD_MAX_S):
                    await self._disconnected.wait()

    async def wait_lost(self) -> None:
        await self._lost.wait()

    def publish(self, event: Event) -> None:
        """To every subscription that wants it."""
        for subscription in self._subscriptions:
            if subscription.wants(event):
                subscription.put(event)

    @contextmanager
    def subscription(
        self, path: str, *, is_recursive: bool, events_max: int
    ) -> Iterator["Subscription"]:
        """One that begins with a RESET, for as long as the block runs. Raises SessionLostError.

        ZooKeeper keeps one mode for a path and a session, so that all of a path are of one mode.
        """
        self.raise_if_lost()
        others = [each for each in self._subscriptions if each.path == path]
        assert all(each.is_recursive == is_recursive for each in others), path
        subscription = Subscription(path, is_recursive=is_recursive, events_max=events_max)
        self._subscriptions[subscription] = None
        try:
            yield subscription
        finally:
            del self._subscriptions[subscription]

    def subscription_count(self, path: str) -> int:
        return sum(subscription.path == path for subscription in self._subscriptions)


class Subscription:
    """Events of one watch on their way to its reader, in order."""

    def __init__(self, path: str, *, is_recursive: bool, events_max: int) -> None:
        self.path = path
        self.is_recursive = is_recursive
        self._events_max = events_max
        self._below = f"{path.rstrip('/')}/"
        self._events: deque[Event] = deque()
        self._error: Exception | None = None
        self._has_news = asyncio.Event()
        self.reset()

    def wants(self, event: Event) -> bool:
        """Whether ZooKeeper's persistent watch of this mode covers the event.

        A recursive one hears of no CHILDREN: it hears of the children themselves.
        """
        if not self.is_recursive:
            return event.path == self.path
        is_covered = event.path == self.path or event.path.startswith(self._below)
        return is_covered and event.kind is not EventKind.CHILDREN

    def put(self, event: Event) -> None:
        if len(self._events) >= self._events_max:
            self.reset()
            return
        self._events.append(event)
        self._has_news.set()

    def reset(self) -> None:
        """What waits is out of date, and more may have been missed: one RESET in place of it
        all."""
        self._events.clear()
        self._events.append(Event(kind=EventKind.RESET, path=self.path))
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """End with this error, at once: events of a lost session are of no use."""
        self._error = error
        self._has_news.set()

    async def next(self) -> Event:
        while True:
            if self._error is not None:
                raise self._error
            if self._events:
                return self._events.popleft()
            self._has_news.clear()
            await self._has_news.wait()


def session_lost() -> SessionLostError:
    return SessionLostError("the ZooKeeper session is lost")


def check_size(operations: Sequence[Operation], *, request_bytes_max: int) -> None:
    """Raises RejectedError for a request that is larger than the servers are known to take."""
    weight_bytes = request_bytes(operations)
    if weight_bytes > request_bytes_max:
        raise RejectedError(
            f"the request is larger than zookeeper.request_bytes_max, {request_bytes_max} bytes",
            path=operations[0].path,
            request_bytes=weight_bytes,
        )
