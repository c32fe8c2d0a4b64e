"""Shared by the ZooKeeper store and the store in memory: session state, watches, size limit.

``Session`` has the state of a session and its watch subscriptions. Used only by the event loop of
its store. ``SessionStore`` is the part of a ``MetadataStore`` that needs no more than that.
"""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ledgers.errors import (
    NoNodeError,
    RejectedError,
    SessionLostError,
    UnauthorizedError,
)
from ledgers.manager import create_with_parents
from ledgers.store import (
    ANY_VERSION,
    Create,
    Delete,
    Event,
    EventKind,
    MetadataStore,
    Operation,
    OperationResult,
    SessionState,
    SetData,
    Stat,
    request_bytes,
)

REQUEST_BYTES_MAX = 1_000_000
"""The default size limit of a request. A server closes the connection if a request exceeds its
jute.maxbuffer (1 MiB by default), and all other requests on the connection fail with it."""
READ_TRIES_MAX = 5
"""A read fails after its connection broke this many times; a write fails after the first time."""
BREAK_REPORT_MAX_S = 1.0
"""Longest wait between the failure of a request and the report that its connection broke."""


class Session:
    """The state of a session and its watch subscriptions.

    A session starts connected and may be suspended and resumed any number of times. A lost session
    stays lost.
    """

    def __init__(self) -> None:
        self.state = SessionState.CONNECTED
        self.session_id = 0
        self.request_count = 0
        self.break_count = 0
        """Number of times that the connection broke. If it changed, a request and its reply
        belong to different connections."""
        self._not_suspended = asyncio.Event()
        self._not_suspended.set()
        self._disconnected = asyncio.Event()
        self._lost = asyncio.Event()
        self._subscriptions: dict[Subscription, None] = {}
        self._by_path: dict[str, list[Subscription]] = {}
        self.on_not_suspended: Callable[[], None] = lambda: None
        """Called after the session is resumed, and after it is lost."""

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
        """Return when CONNECTED. Raises SessionLostError if the session is lost."""
        while self.state is SessionState.SUSPENDED:
            await self._not_suspended.wait()
        self.raise_if_lost()

    async def wait_disconnected(self) -> None:
        await self._disconnected.wait()

    async def wait_break_reported(self, break_count: int) -> None:
        """Wait until the break that failed a request is reported, ``BREAK_REPORT_MAX_S`` at most.

        ``break_count``: the count when the request was sent. When a connection breaks, kazoo:

        1. fails the requests in flight;
        2. reports the state change, which suspends this session.

        A request that is sent again between 1 and 2 fails at once because of the same break, each
        time that it is sent.
        """
        if self.break_count == break_count:
            with suppress(TimeoutError):
                async with asyncio.timeout(BREAK_REPORT_MAX_S):
                    await self._disconnected.wait()

    async def wait_lost(self) -> None:
        await self._lost.wait()

    def publish(self, events: Iterable[Event]) -> None:
        """Give each event to every subscription that wants it: those of its path, and the recursive
        ones of the paths above."""
        by_path = self._by_path
        for event in events:
            path = event.path
            while path:
                for subscription in by_path.get(path, ()):
                    if subscription.wants(event):
                        subscription.put(event)
                path = path.rpartition("/")[0]
            for subscription in by_path.get("/", ()) if event.path != "/" else ():
                if subscription.wants(event):
                    subscription.put(event)

    @contextmanager
    def subscription(
        self, path: str, *, is_recursive: bool, events_max: int
    ) -> Iterator["Subscription"]:
        """Open a subscription for the ``with`` block. Its first event is a RESET.

        ZooKeeper keeps one watch mode per path and session. So all subscriptions to a path must
        agree on ``is_recursive``. Raises SessionLostError.
        """
        self.raise_if_lost()
        others = self._by_path.setdefault(path, [])
        assert all(each.is_recursive == is_recursive for each in others), path
        subscription = Subscription(path, is_recursive=is_recursive, events_max=events_max)
        self._subscriptions[subscription] = None
        others.append(subscription)
        try:
            yield subscription
        finally:
            del self._subscriptions[subscription]
            others.remove(subscription)
            if not others:
                del self._by_path[path]

    def subscription_count(self, path: str) -> int:
        return len(self._by_path.get(path, ()))


class Subscription:
    """The unread events of one watch, in order."""

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
        """True if ZooKeeper's persistent watch of this mode covers the event.

        A recursive watch gets no CHILDREN events, because it gets the events of the children.
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
        """Replace all unread events by one RESET: they are out of date, and other events may have
        been missed."""
        self._events.clear()
        self._events.append(Event(kind=EventKind.RESET, path=self.path))
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Make ``next`` raise this error at once. Unread events of a lost session are useless."""
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


class SessionStore(MetadataStore):
    """A ``MetadataStore`` on a session. A subclass adds reads, transactions and watches."""

    request_bytes_max = REQUEST_BYTES_MAX

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def state(self) -> SessionState:
        return self._session.state

    @property
    def session_id(self) -> int:
        return self._session.session_id

    @property
    def request_count(self) -> int:
        return self._session.request_count

    @property
    def break_count(self) -> int:
        return self._session.break_count

    async def wait_lost(self) -> None:
        await self._session.wait_lost()

    async def wait_connected(self) -> None:
        await self._session.wait_connected()

    async def wait_disconnected(self) -> None:
        await self._session.wait_disconnected()

    async def get_each(
        self, paths: Sequence[str]
    ) -> list[tuple[bytes, Stat] | NoNodeError | UnauthorizedError]:
        return await asyncio.gather(*map(self._get_if_any, paths))

    async def _get_if_any(self, path: str) -> tuple[bytes, Stat] | NoNodeError | UnauthorizedError:
        try:
            return await self.get(path)
        except (NoNodeError, UnauthorizedError) as error:
            return error

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        is_ephemeral: bool = False,
        is_sequential: bool = False,
        with_parents: bool = False,
    ) -> str:
        create = Create(
            path=path, data=data, is_ephemeral=is_ephemeral, is_sequential=is_sequential
        )
        if with_parents:
            return await create_with_parents(self, create)
        made = await self._write_one(create)
        assert isinstance(made, str), made
        return made

    async def set(self, path: str, data: bytes, *, version: int) -> Stat:
        stat = await self._write_one(SetData(path=path, data=data, version=version))
        assert isinstance(stat, Stat), stat
        return stat

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        await self._write_one(Delete(path=path, version=version))

    @abstractmethod
    async def _write_one(self, operation: Operation) -> OperationResult:
        """Apply the operation, alone and without a transaction."""


def session_lost() -> SessionLostError:
    return SessionLostError("the ZooKeeper session is lost")


def check_size(operations: Sequence[Operation], *, request_bytes_max: int) -> None:
    """Raise RejectedError if the request is larger than ``request_bytes_max``."""
    weight_bytes = request_bytes(operations)
    if weight_bytes > request_bytes_max:
        raise RejectedError(
            f"the request is larger than zookeeper.request_bytes_max, {request_bytes_max} bytes",
            path=operations[0].path,
            request_bytes=weight_bytes,
        )
