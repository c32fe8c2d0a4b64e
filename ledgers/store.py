"""The metadata store: a tree of versioned znodes, its requests and events, and one session with it.

``MetadataStore`` is what everybody uses. ``zookeeper.store`` implements it for ZooKeeper, and
``tests.memory.store`` in memory. Both pass ``tests/contract/test_metadata_store*.py``. A store
lives as long as one session. After the session is lost, every call raises ``SessionLostError``, and
the owner of the store opens a new one.

``Session`` is the part of a session that does not depend on the implementation: its state, and its
watches (``Subscription``). Only the event loop of its store uses it.
"""

from __future__ import annotations

import asyncio
import copy
import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self

from msgspec import Struct

from ledgers.errors import (
    NodeExistsError,
    NoNodeError,
    RejectedError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)

ANY_VERSION = -1
EVENTS_MAX = 10_000
"""Default bound on the unread events of a watch."""
REQUEST_BYTES_MAX = 1_000_000
"""The default size limit of a request. A server closes the connection if a request exceeds its
jute.maxbuffer (1 MiB by default), and all other requests on the connection fail with it."""
READ_TRIES_MAX = 5
"""A read fails after its connection broke this many times; a write fails after the first time."""
CREATE_TRIES_MAX = 10
"""A client that deletes a ledger also deletes the parents that this leaves empty. So a parent that
is created here may be deleted before its child is created."""
SILENT_S = 2.5
"""A store that waits for an answer for longer is silent. Shorter pauses of a server are usual."""
BREAK_REPORT_MAX_S = 1.0
"""Longest wait between the failure of a request and the report that its connection broke."""


class Stat(Struct, frozen=True, kw_only=True):
    """The state of a znode besides its data. ``version`` counts data changes from 0."""

    version: int
    czxid: int = 0
    mzxid: int = 0
    pzxid: int = 0
    """The zxid of the last creation or deletion of a child."""
    cversion: int = 0
    """Number of creations and deletions of children."""
    ctime_ms: int = 0
    mtime_ms: int = 0
    ephemeral_owner: int = 0
    """Session id of the owner, 0 for a persistent znode."""
    child_count: int = 0


class Create(Struct, frozen=True, kw_only=True):
    path: str
    data: bytes = b""
    is_ephemeral: bool = False
    is_sequential: bool = False

    def __repr__(self) -> str:  # without the data, which may hold a ledger's password
        return f"Create({self.path}, {len(self.data)} bytes)"


class SetData(Struct, frozen=True, kw_only=True):
    path: str
    data: bytes
    version: int

    def __repr__(self) -> str:  # without the data, which may hold a ledger's password
        return f"SetData({self.path}, {len(self.data)} bytes, version={self.version})"


class Delete(Struct, frozen=True, kw_only=True):
    path: str
    version: int = ANY_VERSION


class Check(Struct, frozen=True, kw_only=True):
    """Succeeds only if the znode exists and, if a version is given, has this version."""

    path: str
    version: int = ANY_VERSION


Operation = Create | SetData | Delete | Check
OperationResult = Stat | str | None
"""Result of an applied operation: a path for Create, a Stat for SetData, else None."""

_WITH_DATA = (Create, SetData)


def request_bytes(operations: Iterable[Operation]) -> int:
    """Return a lower estimate of the request size of these operations."""
    total_bytes = 0
    for operation in operations:
        total_bytes += len(operation.path) + 64
        if isinstance(operation, _WITH_DATA):
            total_bytes += len(operation.data)
    return total_bytes


class MultiFailed(Exception):
    """A transaction was not applied. ``index``: the failed operation; ``cause``: its error."""

    def __init__(self, index: int, cause: Exception) -> None:
        super().__init__(f"operation {index} failed: {cause}")
        self.index = index
        self.cause = cause


class SessionState(enum.Enum):
    CONNECTED = "connected"
    SUSPENDED = "suspended"
    """The connection is down; the session may still be alive. Reads and writes wait."""
    LOST = "lost"
    """Final for this store."""


class EventKind(enum.Enum):
    CREATED = "created"
    DELETED = "deleted"
    CHANGED = "changed"
    CHILDREN = "children"
    RESET = "reset"
    """Events may have been missed, as after a reconnection. Read all watched data again."""


UNTOLD = -1
"""An unknown zxid."""


class Event(Struct, frozen=True, kw_only=True):
    kind: EventKind
    path: str
    zxid: int = UNTOLD
    """The zxid of the write. UNTOLD with servers before 3.9, and for a RESET."""


class MetadataStore(ABC):
    """One session: asynchronous, pipelined access. Only the event loop of the store calls it.

    Every call may raise ``UnavailableError`` (timeout, connection lost), ``UnknownOutcomeError``
    (the reply to a write was lost), ``SessionLostError``, ``UnauthorizedError`` (ACLs), and
    RejectedError for a write above ``request_bytes_max``. Calls made while SUSPENDED wait.
    """

    def __init__(self, session: Session, *, request_bytes_max: int = REQUEST_BYTES_MAX) -> None:
        self._session = session
        self._is_read_only = False
        self.request_bytes_max = request_bytes_max

    def as_read_only(self) -> Self:
        """Return a store on this session that only reads, for programs that observe. Each write,
        also a transaction of checks only, raises AssertionError and is not sent."""
        reader = copy.copy(self)
        reader._is_read_only = True
        return reader

    @property
    def state(self) -> SessionState:
        return self._session.state

    @property
    def silent_s(self) -> float:
        """For how long nothing was answered although a request or a ping waits; 0: nothing waits.
        May be read on any thread."""
        return self._session.silent_s

    @property
    def is_silent(self) -> bool:
        return self.silent_s > SILENT_S

    @property
    def session_id(self) -> int:
        return self._session.session_id

    @property
    def request_count(self) -> int:
        """Number of requests sent so far. A multi counts as one."""
        return self._session.request_count

    @property
    def break_count(self) -> int:
        """Breaks of the connection. Events may be lost until each watch yields its RESET."""
        return self._session.break_count

    async def wait_lost(self) -> None:
        """Return when the session is lost."""
        await self._session.lost.wait()

    async def wait_connected(self) -> None:
        """Return when CONNECTED. Raises SessionLostError when the session is lost."""
        await self._session.wait_connected()

    async def wait_disconnected(self) -> None:
        """Return when the session is not CONNECTED."""
        await self._session.disconnected.wait()

    @abstractmethod
    async def get(self, path: str) -> tuple[bytes, Stat]:
        """Return data and state of a znode. Raises NoNodeError."""

    async def get_each(
        self, paths: Sequence[str]
    ) -> list[tuple[bytes, Stat] | NoNodeError | UnauthorizedError]:
        """Return what ``get`` returns or raises for each znode, in order, at a fraction of the
        cost. The reads are not atomic, and give way to other requests for a moment."""

        async def get(path: str) -> tuple[bytes, Stat] | NoNodeError | UnauthorizedError:
            try:
                return await self.get(path)
            except (NoNodeError, UnauthorizedError) as error:
                return error

        return await asyncio.gather(*map(get, paths))

    @abstractmethod
    async def exists(self, path: str) -> Stat | None:
        """Return the state of a znode; None if there is no such znode."""

    @abstractmethod
    async def children(self, path: str) -> list[str]:
        """Return the names of all children, or raise an error (rule S8). Raises NoNodeError."""

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        is_ephemeral: bool = False,
        is_sequential: bool = False,
        with_parents: bool = False,
    ) -> str:
        """Create a znode and return its path. Parents are created persistent and empty. Raises
        NodeExistsError, NoNodeError; UnavailableError if others keep deleting the parents."""
        create = Create(
            path=path, data=data, is_ephemeral=is_ephemeral, is_sequential=is_sequential
        )
        for _ in range(CREATE_TRIES_MAX):
            try:
                (made,) = await self._write([create])
            except NoNodeError:
                if not with_parents:
                    raise
                with suppress(NodeExistsError):
                    await self.create(path.rpartition("/")[0], with_parents=True)
            else:
                return str(made)
        raise UnavailableError("other clients keep deleting its parent znodes", path=path)

    async def set(self, path: str, data: bytes, *, version: int) -> Stat:
        """Replace the data of a znode. Raises NoNodeError, ConflictError (the version differs)."""
        (stat,) = await self._write([SetData(path=path, data=data, version=version)])
        assert isinstance(stat, Stat), stat
        return stat

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a znode. Raises NoNodeError, ConflictError (other version), NotEmptyError."""
        await self._write([Delete(path=path, version=version)])

    async def multi(self, operations: Sequence[Operation]) -> list[OperationResult]:
        """Apply all operations or none, and return their results in order. Raises MultiFailed,
        whose cause is the error that the single call would have raised."""
        return await self._write(operations, is_multi=True)

    async def _write(
        self, operations: Sequence[Operation], *, is_multi: bool = False
    ) -> list[OperationResult]:
        """Check and send a write. All writes pass here."""
        if self._is_read_only:
            raise AssertionError(f"a read-only session must not write: {operations}")
        if not operations:
            return []
        size_bytes = request_bytes(operations)
        if size_bytes > self.request_bytes_max:
            raise RejectedError(
                "the request is larger than zookeeper.request_bytes_max, "
                f"{self.request_bytes_max} bytes",
                path=operations[0].path,
                request_bytes=size_bytes,
            )
        return await self._send(operations, is_multi=is_multi)

    @abstractmethod
    async def _send(
        self, operations: Sequence[Operation], *, is_multi: bool
    ) -> list[OperationResult]:
        """Apply the operations as a transaction; without ``is_multi`` apply the only operation, and
        raise its error itself instead of MultiFailed."""

    @abstractmethod
    async def sync(self, path: str) -> None:
        """Wait until reads of this session see all writes made by anyone before this call."""

    @abstractmethod
    def watch(
        self, path: str, *, is_recursive: bool = False, events_max: int = EVENTS_MAX
    ) -> AsyncGenerator[Event, None]:
        """Yield events of a znode: its data and children; with ``is_recursive`` those of all
        descendants as well.

        The watch is persistent. The first event is a RESET, sent after the watch is registered, so
        a reader that lists after it misses nothing. Another RESET follows each reconnection. Ends
        with SessionLostError. Closing the iterator (``aclosing``) removes the watch.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the session, which deletes its ephemeral znodes at once. May be called repeatedly."""


async def children_if_any(store: MetadataStore, path: str) -> list[str]:
    """Return the names of all children; an empty list if the znode does not exist."""
    try:
        return await store.children(path)
    except NoNodeError:
        return []


def session_lost() -> SessionLostError:
    return SessionLostError("the ZooKeeper session is lost")


class Session:
    """The state of a session and its subscriptions. A session starts connected, and may be
    suspended and resumed any number of times. A lost session stays lost."""

    def __init__(self) -> None:
        self.state = SessionState.CONNECTED
        self.session_id = 0
        self.request_count = 0
        self.break_count = 0
        """Breaks of the connection. If it changed since a request, the reply is lost."""
        self._not_suspended = asyncio.Event()
        self._not_suspended.set()
        self.disconnected = asyncio.Event()
        self.lost = asyncio.Event()
        self._subscriptions: dict[Subscription, None] = {}
        self._by_path: dict[str, list[Subscription]] = {}
        self.on_not_suspended: Callable[[], None] = lambda: None
        """Called after the session is resumed, and after it is lost."""

    @property
    def silent_s(self) -> float:
        return 0.0

    def suspend(self) -> None:
        if self.state is SessionState.CONNECTED:
            self.state = SessionState.SUSPENDED
            self.break_count += 1
            self._not_suspended.clear()
            self.disconnected.set()

    def resume(self) -> None:
        if self.state is SessionState.SUSPENDED:
            self.state = SessionState.CONNECTED
            self._not_suspended.set()
            self.disconnected.clear()
            for subscription in self._subscriptions:
                subscription.reset()
            self.on_not_suspended()

    def lose(self) -> None:
        self.break_count += 1
        self.state = SessionState.LOST
        self._not_suspended.set()
        self.disconnected.set()
        self.lost.set()
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

    async def wait_break_reported(self, break_count: int) -> None:
        """Wait until the break that failed a request is reported, ``BREAK_REPORT_MAX_S`` at most.
        kazoo first fails the requests in flight and then reports the break. A request that is sent
        again in between fails at once, each time. ``break_count``: when the request was sent."""
        if self.break_count == break_count:
            with suppress(TimeoutError):
                async with asyncio.timeout(BREAK_REPORT_MAX_S):
                    await self.disconnected.wait()

    def publish(self, events: Iterable[Event]) -> None:
        """Give each event to the subscriptions of its path, and to the recursive ones above."""
        by_path = self._by_path
        for event in events:
            path = event.path
            while True:
                for subscription in by_path.get(path or "/", ()):
                    if subscription.wants(event):
                        subscription.put(event)
                if path in ("", "/"):
                    break
                path = path.rpartition("/")[0]

    @contextmanager
    def subscription(
        self, path: str, *, is_recursive: bool, events_max: int
    ) -> Iterator[Subscription]:
        """Open a subscription for the ``with`` block. Its first event is a RESET. All subscriptions
        to a path must agree on ``is_recursive``: ZooKeeper keeps one mode. Raises
        SessionLostError."""
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
        """True if ZooKeeper's persistent watch of this mode covers the event. A recursive watch
        gets no CHILDREN events, because it gets the events of the children."""
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
        """Replace all unread events, which are out of date, by one RESET."""
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
