"""The metadata store as the rest of the code sees it: a tree of versioned znodes.

``zookeeper`` is the real one, ``memory.store`` the one for tests and simulation; both pass
``tests/contract/test_metadata_store*.py``. A store lives as long as one session: when that is lost
every call raises ``SessionLostError`` for good, and whoever owned the store opens a new one.
"""

import enum
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from ledgers.errors import NoNodeError

ANY_VERSION = -1
EVENTS_MAX = 10_000
"""Unread events of a watch, unless it is given another number."""


class Stat(Struct, frozen=True, kw_only=True):
    """What the store knows of a znode. ``version`` counts data changes from 0."""

    version: int
    czxid: int = 0
    mzxid: int = 0
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


class SetData(Struct, frozen=True, kw_only=True):
    path: str
    data: bytes
    version: int


class Delete(Struct, frozen=True, kw_only=True):
    path: str
    version: int = ANY_VERSION


class Check(Struct, frozen=True, kw_only=True):
    """Holds only if the znode exists (and, given a version, is at it)."""

    path: str
    version: int = ANY_VERSION


Operation = Create | SetData | Delete | Check
OperationResult = Stat | str | None
"""Of one that was applied: a path for Create, a Stat for SetData, else None."""

_WITH_DATA = (Create, SetData)


def request_bytes(operations: Iterable[Operation]) -> int:
    """What they weigh in a request, about, and at least."""
    total_bytes = 0
    for operation in operations:
        total_bytes += len(operation.path) + 64
        if isinstance(operation, _WITH_DATA):
            total_bytes += len(operation.data)
    return total_bytes


class MultiFailed(Exception):
    """A transaction was not applied. ``index``: the operation at fault; ``cause``: what was wrong."""

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
    """Events may have been missed (reconnected): read again whatever the view rests on."""


UNTOLD = -1
"""A zxid that nobody says."""


class Event(Struct, frozen=True, kw_only=True):
    kind: EventKind
    path: str
    zxid: int = UNTOLD
    """Of the write that it tells of: the znode's mzxid, if it was created or changed. UNTOLD by servers before 3.9, and
    of a RESET."""


class MetadataStore(Protocol):
    """Asynchronous, pipelined access. One loop owns a store; calls come from that loop only.

    A write of more than ``request_bytes_max`` bytes raises RejectedError, and is not sent.

    Every call may raise ``UnavailableError`` (timed out, connection lost), ``UnknownOutcomeError``
    (a write whose reply was lost), ``SessionLostError`` or ``UnauthorizedError`` (ACLs); the further
    errors stand with each. Reads and writes issued while SUSPENDED wait for the session.
    """

    @property
    def request_bytes_max(self) -> int: ...

    @property
    def state(self) -> SessionState: ...

    @property
    def session_id(self) -> int: ...

    @property
    def request_count(self) -> int:
        """Requests sent so far; a multi counts as one."""
        ...

    async def wait_lost(self) -> None:
        """Return when the session is lost."""
        ...

    async def wait_connected(self) -> None:
        """Return when CONNECTED; raises SessionLostError when it never will be again."""
        ...

    async def wait_disconnected(self) -> None:
        """Return when it is not CONNECTED (any more)."""
        ...

    async def get(self, path: str) -> tuple[bytes, Stat]:
        """Raises NoNodeError."""
        ...

    async def exists(self, path: str) -> Stat | None: ...

    async def children(self, path: str) -> list[str]:
        """Names, unordered and complete: a listing that cannot be had whole raises (rule S8).

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
        """Return the path made. Parents are persistent and empty. Raises NodeExistsError, NoNodeError."""
        ...

    async def set(self, path: str, data: bytes, *, version: int) -> Stat:
        """Raises NoNodeError, ConflictError (at another version)."""
        ...

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        """Raises NoNodeError, ConflictError, NotEmptyError."""
        ...

    async def multi(self, operations: Sequence[Operation]) -> list[OperationResult]:
        """All or nothing. Results in order.

        Raises MultiFailed, whose cause is the error that the single call would have raised.
        """
        ...

    async def sync(self, path: str) -> None:
        """Later reads see all that was written anywhere before this call."""
        ...

    def watch(
        self, path: str, *, is_recursive: bool = False, events_max: int = EVENTS_MAX
    ) -> AsyncGenerator[Event, None]:
        """Events of a znode (its data, its children; recursive: of all below too) from now on.

        A persistent watch. The first event is a RESET, sent once the watch stands,
        so that a reader who lists after it misses nothing; another follows each reconnection.
        Ends with SessionLostError. Closing the iterator (``aclosing``) removes the watch.

        On a server before ZooKeeper 3.6 several events may come as one, and a recursive watch raises
        UnsupportedError in place of a RESET.
        """
        ...

    async def close(self) -> None:
        """End the session: its ephemeral znodes go at once. Any number of times."""
        ...


async def children_if_any(store: MetadataStore, path: str) -> list[str]:
    """As ``MetadataStore.children``; empty where there is no such znode either."""
    try:
        return await store.children(path)
    except NoNodeError:
        return []
