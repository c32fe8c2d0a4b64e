"""A ZooKeeper in memory, for tests and simulations: one tree, and any number of sessions on it.

``MemoryStore`` is one session, and ``MemoryTree`` the server. They behave like ZooKeeper as far as
``tests/contract/test_metadata_store*.py`` checks: versions, one zxid for each transaction,
ephemeral owners, counters of sequential names, persistent watches. Sessions are suspended and
expired by hand, and ``MemoryTree.faults`` loses requests and replies. Every request yields to the
loop on its way to the tree and back, so that sessions interleave. ACLs and quotas are left out.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from msgspec import structs

from ledgers.clock import Clock, SystemClock
from ledgers.errors import (
    ConflictError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RejectedError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.store import (
    ANY_VERSION,
    EVENTS_MAX,
    READ_TRIES_MAX,
    UNTOLD,
    Check,
    Create,
    Delete,
    Event,
    EventKind,
    MetadataStore,
    MultiFailed,
    Operation,
    OperationResult,
    Session,
    SessionState,
    SetData,
    Stat,
)

T = TypeVar("T")


class Fault(enum.Enum):
    """Loss of a request, or of its reply."""

    LOST_REQUEST = "lost-request"
    """The request never arrives."""
    LOST_REPLY = "lost-reply"
    """The request is executed, but its sender gets no reply."""


FaultHook = Callable[["MemoryStore", Sequence[Operation]], Fault | None]
"""Called for every request before it is sent. A read has no operations.

It may also suspend or expire the session, which loses the request.
"""


async def _yield() -> None:
    await asyncio.sleep(0)


class MemoryStore(MetadataStore):
    """One session on a ``MemoryTree``: a ``MetadataStore``."""

    def __init__(self, tree: MemoryTree) -> None:
        self.session = Session()
        super().__init__(self.session)
        self.seen: Nodes | None = None
        """The state that a lagging server reads; None if it is up to date."""
        self._tree = tree
        tree.begin(self.session)

    async def get(self, path: str) -> tuple[bytes, Stat]:
        def read() -> tuple[bytes, Stat]:
            node = self._nodes[path]
            return node.data, node.stat

        return await self._read(read)

    async def exists(self, path: str) -> Stat | None:
        def read() -> Stat | None:
            node = self._nodes.find(path)
            return None if node is None else node.stat

        return await self._read(read)

    async def children(self, path: str) -> list[str]:
        return await self._read(lambda: list(self._nodes[path].names))

    async def sync(self, path: str) -> None:
        await self._read(self._catch_up)

    async def _send(
        self, operations: Sequence[Operation], *, is_multi: bool
    ) -> list[OperationResult]:
        if not is_multi:  # a test that replaces ``multi`` means all writes
            try:
                return await self.multi(operations)
            except MultiFailed as failure:
                raise failure.cause from None
        try:
            return await self._exchange(lambda: self._apply(operations), operations)
        except _ConnectionBroke:
            raise UnknownOutcomeError("the reply to a write was lost") from None

    async def watch(
        self, path: str, *, is_recursive: bool = False, events_max: int = EVENTS_MAX
    ) -> AsyncGenerator[Event, None]:
        await self.wait_connected()
        with self.session.subscription(
            path, is_recursive=is_recursive, events_max=events_max
        ) as subscription:
            while True:
                yield await subscription.next()

    async def close(self) -> None:
        self._tree.end(self.session_id)
        self.session.lose()

    @property
    def _nodes(self) -> Nodes:
        return self._tree.nodes if self.seen is None else self.seen

    def _catch_up(self) -> None:
        self.seen = None

    def _apply(self, operations: Sequence[Operation]) -> list[OperationResult]:
        self._catch_up()
        return self._tree.apply(self.session_id, operations)

    async def _read(self, read: Callable[[], T]) -> T:
        for _ in range(READ_TRIES_MAX):
            try:
                return await self._exchange(read, ())
            except _ConnectionBroke:
                continue
        raise UnavailableError("the connection broke again and again")

    async def _exchange(self, serve: Callable[[], T], operations: Sequence[Operation]) -> T:
        """Send a request, call ``serve`` when it has arrived, and return the reply."""
        await self.wait_connected()
        self.session.request_count += 1
        break_count = self.session.break_count
        faults = self._tree.faults
        fault = None if faults is None else faults(self, operations)
        await self._travel(break_count, is_lost=fault is Fault.LOST_REQUEST)
        try:
            return serve()
        finally:  # an error travels like any other reply
            await self._travel(break_count, is_lost=fault is Fault.LOST_REPLY)

    async def _travel(self, break_count: int, *, is_lost: bool) -> None:
        await self._tree.latency()
        self.session.raise_if_lost()
        if is_lost or self.session.break_count != break_count:
            raise _ConnectionBroke


class MemoryTree:
    """The server: its znodes and sessions."""

    def __init__(
        self, *, clock: Clock | None = None, latency: Callable[[], Awaitable[None]] = _yield
    ) -> None:
        """``latency``: awaited by every request, once on the way there and once on the way back."""
        self.latency = latency
        self.faults: FaultHook | None = None
        self.tells_zxids = True
        """False: events have no zxid, like ZooKeeper before 3.9."""
        self.nodes = Nodes()
        self._clock = clock or SystemClock()
        self._zxid = 0
        self._session_count = 0
        self._sessions: dict[int, Session] = {}

    def snapshot(self) -> dict[str, bytes]:
        """Return the data of every znode, by path."""
        return self.nodes.snapshot()

    def suspend(self, store: MemoryStore) -> None:
        """Break the connection. Requests in flight are lost, later calls wait."""
        store.session.suspend()

    def resume(self, store: MemoryStore) -> None:
        """Connect again. The session is LOST if it expired meanwhile."""
        if store.session_id in self._sessions:
            store.session.resume()
        else:
            store.session.lose()

    def lag(self, store: MemoryStore) -> None:
        """Let the session's server lag: it reads the present state until its next write or
        ``sync``.

        Its watches do not lag.
        """
        store.seen = self.nodes.copy()

    def expire(self, store: MemoryStore) -> None:
        """Expire the session on the server, and delete its ephemeral znodes.

        A suspended store is informed when it is resumed, any other store at once.
        """
        self.end(store.session_id)
        if store.state is not SessionState.SUSPENDED:
            store.session.lose()

    def begin(self, session: Session) -> None:
        """Add a new session and give it an id."""
        self._session_count += 1
        session.session_id = self._session_count
        self._sessions[session.session_id] = session

    def end(self, session_id: int) -> None:
        if self._sessions.pop(session_id, None) is not None:
            owned = self.nodes.owned_by(session_id)
            self.apply(session_id, [Delete(path=path) for path in owned])

    def apply(self, session_id: int, operations: Sequence[Operation]) -> list[OperationResult]:
        """Apply all operations or none. Raises MultiFailed."""
        transaction = Transaction(
            self.nodes, zxid=self._zxid + 1, now_ms=self._clock.wall_ms(), session_id=session_id
        )
        results: list[OperationResult] = []
        for index, operation in enumerate(operations):
            try:
                results.append(transaction.apply(operation))
            except RejectedError as error:
                transaction.undo()
                raise MultiFailed(index, error) from error
        self._zxid += 1
        connected = [x for x in self._sessions.values() if x.state is SessionState.CONNECTED]
        for event in transaction.events:
            if not self.tells_zxids:
                event = structs.replace(event, zxid=UNTOLD)
            for session in connected:
                session.publish([event])
        return results


@dataclass(slots=True, kw_only=True)
class Node:
    """A znode. ``names``: its children, in the order of their creation."""

    data: bytes = b""
    version: int = 0
    czxid: int = 0
    mzxid: int = 0
    pzxid: int = 0
    ctime_ms: int = 0
    mtime_ms: int = 0
    ephemeral_owner: int = 0
    names: dict[str, None] = field(default_factory=dict)
    made_count: int = 0
    """Number of children ever created. Sequential names use this counter, as in ZooKeeper."""

    @property
    def stat(self) -> Stat:
        return Stat(
            version=self.version,
            czxid=self.czxid,
            mzxid=self.mzxid,
            pzxid=self.pzxid,
            cversion=2 * self.made_count - len(self.names),
            ctime_ms=self.ctime_ms,
            mtime_ms=self.mtime_ms,
            ephemeral_owner=self.ephemeral_owner,
            child_count=len(self.names),
        )


class Nodes:
    """All znodes by path."""

    def __init__(self) -> None:
        self._by_path: dict[str, Node] = {"/": Node()}

    def find(self, path: str) -> Node | None:
        assert path == "/" or (path.startswith("/") and not path.endswith("/")), path
        return self._by_path.get(path)

    def __getitem__(self, path: str) -> Node:
        """Return the znode. Raises NoNodeError."""
        node = self.find(path)
        if node is None:
            raise NoNodeError("there is no such znode", path=path)
        return node

    def add(self, path: str, node: Node) -> None:
        parent_path, name = _split(path)
        self[parent_path].names[name] = None
        self._by_path[path] = node

    def remove(self, path: str) -> None:
        parent_path, name = _split(path)
        del self[parent_path].names[name]
        del self._by_path[path]

    def copy(self) -> Nodes:
        """Return a copy that later changes do not affect."""
        snapshot = Nodes()
        snapshot._by_path = {
            path: replace(node, names=dict(node.names)) for path, node in self._by_path.items()
        }
        return snapshot

    def owned_by(self, session_id: int) -> list[str]:
        return [path for path, node in self._by_path.items() if node.ephemeral_owner == session_id]

    def snapshot(self) -> dict[str, bytes]:
        return {path: node.data for path, node in self._by_path.items()}


class Transaction:
    """Applies operations one by one. ``undo`` reverts all of them."""

    def __init__(self, nodes: Nodes, *, zxid: int, now_ms: int, session_id: int) -> None:
        self.events: list[Event] = []
        self._nodes = nodes
        self._zxid = zxid
        self._now_ms = now_ms
        self._session_id = session_id
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        for step in reversed(self._undo):
            step()

    def apply(self, operation: Operation) -> OperationResult:
        """Apply one operation. Raises what the corresponding method of ``MetadataStore`` raises."""
        match operation:
            case Create():
                return self._create(operation)
            case SetData():
                return self._set(operation)
            case Delete():
                self._delete(operation)
            case Check(path=path, version=version):
                self._at_version(path, version)
        return None

    def _create(self, create: Create) -> str:
        parent_path, _ = _split(create.path)
        parent = self._nodes.find(parent_path)
        if parent is None:
            raise NoNodeError("there is no such znode", path=create.path)
        path = f"{create.path}{parent.made_count:010d}" if create.is_sequential else create.path
        if self._nodes.find(path) is not None:
            raise NodeExistsError("there is such a znode already", path=path)
        if parent.ephemeral_owner:
            raise RejectedError("an ephemeral znode has no children", path=path)
        node = Node(
            data=create.data,
            czxid=self._zxid,
            mzxid=self._zxid,
            pzxid=self._zxid,
            ctime_ms=self._now_ms,
            mtime_ms=self._now_ms,
            ephemeral_owner=self._session_id if create.is_ephemeral else 0,
        )
        self._nodes.add(path, node)
        parent.made_count += 1
        pzxid_before, parent.pzxid = parent.pzxid, self._zxid

        def undo() -> None:
            self._nodes.remove(path)
            parent.made_count -= 1
            parent.pzxid = pzxid_before

        self._undo.append(undo)
        self._happened(EventKind.CREATED, path)
        self._happened(EventKind.CHILDREN, parent_path)
        return path

    def _set(self, change: SetData) -> Stat:
        node = self._at_version(change.path, change.version)
        before = node.data, node.version, node.mzxid, node.mtime_ms

        def undo() -> None:
            node.data, node.version, node.mzxid, node.mtime_ms = before

        self._undo.append(undo)
        node.data, node.version = change.data, node.version + 1
        node.mzxid, node.mtime_ms = self._zxid, self._now_ms
        self._happened(EventKind.CHANGED, change.path)
        return node.stat

    def _delete(self, delete: Delete) -> None:
        node = self._at_version(delete.path, delete.version)
        if node.names:
            raise NotEmptyError("the znode has children", path=delete.path)
        self._nodes.remove(delete.path)
        parent = self._nodes[_split(delete.path)[0]]
        pzxid_before, parent.pzxid = parent.pzxid, self._zxid

        def undo() -> None:
            self._nodes.add(delete.path, node)
            parent.pzxid = pzxid_before

        self._undo.append(undo)
        self._happened(EventKind.DELETED, delete.path)
        self._happened(EventKind.CHILDREN, _split(delete.path)[0])

    def _at_version(self, path: str, version: int) -> Node:
        node = self._nodes[path]
        if version not in (ANY_VERSION, node.version):
            raise ConflictError("the znode is at another version", path=path, version=version)
        return node

    def _happened(self, kind: EventKind, path: str) -> None:
        self.events.append(Event(kind=kind, path=path, zxid=self._zxid))


def _split(path: str) -> tuple[str, str]:
    """Return the path of the parent, and the name."""
    parent, _, name = path.rpartition("/")
    return parent or "/", name


class _ConnectionBroke(Exception):
    """A request or its reply was lost."""
