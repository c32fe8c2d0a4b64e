"""The interface of the metadata store: a tree of versioned znodes.

``zookeeper`` implements ``MetadataStore`` for ZooKeeper, ``memory.store`` for tests and simulation.
Both pass ``tests/contract/test_metadata_store*.py``. A store lives as long as one session. After
the session is lost, every call raises ``SessionLostError``, and the owner of the store opens a new
one.

``ReadOnlyStore`` only reads. With it, a bug in an observing program cannot change anything.
"""

import enum
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import NoReturn, Protocol

from msgspec import Struct

from ledgers.errors import NoNodeError, UnauthorizedError

ANY_VERSION = -1
EVENTS_MAX = 10_000
"""Default bound on the unread events of a watch."""


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
    """Events may have been missed, for example after a reconnection. Read all watched data
    again."""


UNTOLD = -1
"""An unknown zxid."""


class Event(Struct, frozen=True, kw_only=True):
    kind: EventKind
    path: str
    zxid: int = UNTOLD
    """The zxid of the write: the mzxid of the znode if it was created or changed. UNTOLD with
    servers before 3.9, and for a RESET."""


class MetadataStore(Protocol):
    """Asynchronous, pipelined access. A store belongs to one event loop, and only that loop calls
    it.

    A write of more than ``request_bytes_max`` bytes raises RejectedError and is not sent.

    Every call may raise ``UnavailableError`` (timeout, connection lost), ``UnknownOutcomeError``
    (the reply to a write was lost), ``SessionLostError`` or ``UnauthorizedError`` (ACLs). Further
    errors are listed with each call. Calls made while SUSPENDED wait for the session.
    """

    @property
    def request_bytes_max(self) -> int: ...

    @property
    def state(self) -> SessionState: ...

    @property
    def session_id(self) -> int: ...

    @property
    def request_count(self) -> int:
        """Number of requests sent so far. A multi counts as one."""
        ...

    @property
    def break_count(self) -> int:
        """Number of times that the connection broke. Events may be lost until each watch has
        yielded its RESET."""
        ...

    async def wait_lost(self) -> None:
        """Return when the session is lost."""
        ...

    async def wait_connected(self) -> None:
        """Return when CONNECTED. Raises SessionLostError when the session is lost."""
        ...

    async def wait_disconnected(self) -> None:
        """Return when the session is not CONNECTED."""
        ...

    async def get(self, path: str) -> tuple[bytes, Stat]:
        """Return data and state of a znode. Raises NoNodeError."""
        ...

    async def get_each(
        self, paths: Sequence[str]
    ) -> list[tuple[bytes, Stat] | NoNodeError | UnauthorizedError]:
        """Return what ``get`` returns or raises for each of these znodes, in order. For thousands
        of znodes this costs a fraction of as many calls of ``get``. The reads are not atomic, and
        give way to other requests for a moment."""
        ...

    async def exists(self, path: str) -> Stat | None:
        """Return the state of a znode; None if there is no such znode."""
        ...

    async def children(self, path: str) -> list[str]:
        """Return the names of all children, unordered. An incomplete listing raises an error (rule
        S8).

        Raises NoNodeError.
        """
        ...

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        is_ephemeral: bool = False,
        is_sequential: bool = False,
        with_parents: bool = False,
    ) -> str:
        """Create a znode and return its path. Parents are created persistent and empty.

        Raises NodeExistsError, NoNodeError.
        """
        ...

    async def set(self, path: str, data: bytes, *, version: int) -> Stat:
        """Replace the data of a znode. Raises NoNodeError, ConflictError (the version differs)."""
        ...

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Delete a znode. Raises NoNodeError, ConflictError (the version differs), NotEmptyError
        (it has children)."""
        ...

    async def multi(self, operations: Sequence[Operation]) -> list[OperationResult]:
        """Apply all operations or none, and return their results in order.

        Raises MultiFailed, whose cause is the error that the single call would have raised.
        """
        ...

    async def sync(self, path: str) -> None:
        """Wait until reads of this session see all writes made by anyone before this call."""
        ...

    def watch(
        self, path: str, *, is_recursive: bool = False, events_max: int = EVENTS_MAX
    ) -> AsyncGenerator[Event, None]:
        """Yield events of a znode: its data and children; with ``is_recursive`` those of all
        descendants as well.

        The watch is persistent. The first event is a RESET, sent after the watch is registered, so
        a reader that lists after it misses nothing. Another RESET follows each reconnection. Ends
        with SessionLostError. Closing the iterator (``aclosing``) removes the watch.
        """
        ...

    async def close(self) -> None:
        """End the session, which deletes its ephemeral znodes at once. May be called repeatedly."""
        ...


async def children_if_any(store: MetadataStore, path: str) -> list[str]:
    """Return the names of all children; an empty list if the znode does not exist."""
    try:
        return await store.children(path)
    except NoNodeError:
        return []


class ReadOnlyStore:
    """The session of another store without writes. Each write raises AssertionError, unsent."""

    def __init__(self, store: MetadataStore) -> None:
        """``store`` is closed together with this store."""
        self._store = store

    @property
    def request_bytes_max(self) -> int:
        return self._store.request_bytes_max

    @property
    def state(self) -> SessionState:
        return self._store.state

    @property
    def session_id(self) -> int:
        return self._store.session_id

    @property
    def request_count(self) -> int:
        return self._store.request_count

    @property
    def break_count(self) -> int:
        return self._store.break_count

    async def wait_lost(self) -> None:
        await self._store.wait_lost()

    async def wait_connected(self) -> None:
        await self._store.wait_connected()

    async def wait_disconnected(self) -> None:
        await self._store.wait_disconnected()

    async def get(self, path: str) -> tuple[bytes, Stat]:
        return await self._store.get(path)

    async def get_each(
        self, paths: Sequence[str]
    ) -> list[tuple[bytes, Stat] | NoNodeError | UnauthorizedError]:
        return await self._store.get_each(paths)

    async def exists(self, path: str) -> Stat | None:
        return await self._store.exists(path)

    async def children(self, path: str) -> list[str]:
        return await self._store.children(path)

    async def sync(self, path: str) -> None:
        await self._store.sync(path)

    def watch(
        self, path: str, *, is_recursive: bool = False, events_max: int = EVENTS_MAX
    ) -> AsyncGenerator[Event, None]:
        return self._store.watch(path, is_recursive=is_recursive, events_max=events_max)

    async def close(self) -> None:
        await self._store.close()

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        is_ephemeral: bool = False,
        is_sequential: bool = False,
        with_parents: bool = False,
    ) -> str:
        _refuse(f"create {path}")

    async def set(self, path: str, data: bytes, *, version: int) -> Stat:
        _refuse(f"set {path}")

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        _refuse(f"delete {path}")

    async def multi(self, operations: Sequence[Operation]) -> list[OperationResult]:
        """Raise AssertionError, also if all operations are checks: ZooKeeper logs transactions."""
        _refuse(f"multi of {len(operations)}")


def _refuse(what: str) -> NoReturn:
    raise AssertionError(f"a read-only session must not write: {what}")
