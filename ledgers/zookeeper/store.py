"""The metadata store on ZooKeeper, by way of kazoo: one session, asynchronous and pipelined.

What becomes of a call whose connection breaks:

- a read is sent again when the same session is connected again, a few times;
- a watch is asked for until it stands;
- a write raises UnknownOutcomeError: it may have reached the server, or not;
- once the session is lost every call raises SessionLostError, those under way too (a write among
  them may have happened).

Calls made while SUSPENDED wait, which ends with the session at the latest.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from kazoo.exceptions import ConnectionLoss, SessionMovedError
from kazoo.protocol.serialization import Exists, GetChildren, GetData, Sync, Transaction

from ledgers.answers import until_answered
from ledgers.clock import SystemClock
from ledgers.errors import NoNodeError, UnavailableError, UnsupportedError
from ledgers.store import (
    ANY_VERSION,
    EVENTS_MAX,
    Create,
    Delete,
    Event,
    EventKind,
    Operation,
    OperationResult,
    SessionState,
    SetData,
    Stat,
)
from ledgers.zookeeper.kazoo_session import KazooSession
from ledgers.zookeeper.kazoo_watch import (
    AddOneShotWatch,
    AddWatch,
    OneShotWatch,
    RemoveWatches,
    WatchMode,
)
from ledgers.zookeeper.outbox import Outbox
from ledgers.zookeeper.parents import create_with_parents
from ledgers.zookeeper.requests import REPLY_ERRORS, error_of, request_of, results_of, stat_of
from ledgers.zookeeper.session import READ_TRIES_MAX, REQUEST_BYTES_MAX, check_size


class ZooKeeperStore:
    """One session: a ``MetadataStore``. Made by ``open``; ``close`` it also when it is lost."""

    def __init__(
        self,
        session: KazooSession,
        *,
        is_secured: bool,
        request_bytes_max: int = REQUEST_BYTES_MAX,
    ) -> None:
        self._session = session
        self.request_bytes_max = request_bytes_max
        self._is_secured = is_secured
        self._clock = SystemClock()
        self._outbox = Outbox(session, can_join=not session.is_old)
        self._has_persistent_watches = not session.is_old
        """False also once another server, of before 3.6, has said that it knows none."""

    @classmethod
    async def open(
        cls,
        hosts: str,
        *,
        session_timeout_s: float = 10.0,
        connect_timeout_s: float = 10.0,
        credentials: Sequence[tuple[str, str]] = (),
        is_secured: bool = False,
        ends_with_loop: bool = False,
        request_bytes_max: int = REQUEST_BYTES_MAX,
    ) -> "ZooKeeperStore":
        """A new session. ``hosts``: ``host:port`` joined by commas; any of them may be asked first.

        ``credentials``: pairs like ``("digest", "user:password")``. ``is_secured``: what we create
        is for that identity alone, as with BookKeeper's ``zkEnableSecurity``. ``ends_with_loop``:
        whether it ends when the loop stands still for three session time-outs, for what it holds to
        be others'. ``request_bytes_max``: what the servers' jute.maxbuffer allows. Raises
        UnavailableError when no server answers, UnauthorizedError, SettingsError.
        """
        session = KazooSession(
            hosts,
            session_timeout_s=session_timeout_s,
            credentials=credentials,
            ends_with_loop=ends_with_loop,
        )
        await session.open(timeout_s=connect_timeout_s)
        return cls(session, is_secured=is_secured, request_bytes_max=request_bytes_max)

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
    def requests_per_s(self) -> int:
        """That may be sent at most; 0: as many as ZooKeeper's latency allows. To be set at any
        time.

        A transaction counts as one, and so do reads that went together.
        """
        return self._outbox.requests_per_s

    @requests_per_s.setter
    def requests_per_s(self, per_s: int) -> None:
        self._outbox.requests_per_s = per_s

    async def wait_lost(self) -> None:
        await self._session.wait_lost()

    async def wait_connected(self) -> None:
        await self._session.wait_connected()

    async def wait_disconnected(self) -> None:
        await self._session.wait_disconnected()

    async def get(self, path: str) -> tuple[bytes, Stat]:
        data, stat = await self._read(GetData(path, None), path)
        return data or b"", stat_of(stat)  # None: a znode that was created without data

    async def exists(self, path: str) -> Stat | None:
        stat = await self._read(Exists(path, None), path)
        return None if stat is None else stat_of(stat)

    async def children(self, path: str) -> list[str]:
        names: list[str] = await self._read(GetChildren(path, None), path)
        return names

    async def sync(self, path: str) -> None:
        await self._read(Sync(path), path)

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
        return str(await self._write_one(create))

    async def set(self, path: str, data: bytes, *, version: int) -> Stat:
        return stat_of(await self._write_one(SetData(path=path, data=data, version=version)))

    async def delete(self, path: str, *, version: int = ANY_VERSION) -> None:
        await self._write_one(Delete(path=path, version=version))

    async def multi(self, operations: Sequence[Operation]) -> list[OperationResult]:
        if not operations:
            return []
        requests = [request_of(each, is_secured=self._is_secured) for each in operations]
        check_size(operations, request_bytes_max=self.request_bytes_max)
        replies = await self._write(Transaction(requests), operations[0].path)
        return results_of(operations, replies)

    async def watch(
        self, path: str, *, is_recursive: bool = False, events_max: int = EVENTS_MAX
    ) -> AsyncGenerator[Event, None]:
        mode = WatchMode.PERSISTENT_RECURSIVE if is_recursive else WatchMode.PERSISTENT
        with self._session.subscription(
            path, is_recursive=is_recursive, events_max=events_max
        ) as subscription:
            try:
                while True:
                    event = await subscription.next()
                    await self._renew_watch(path, mode, after=event.kind)
                    yield event
            finally:
                if self._session.subscription_count(path) == 1:
                    self._session.tell(RemoveWatches(path))

    async def _renew_watch(self, path: str, mode: WatchMode, *, after: EventKind) -> None:
        """So that what happens after this event is told."""
        if self._has_persistent_watches:
            if after is not EventKind.RESET:
                return
            try:  # a new connection knows of no watches
                await self._answered(AddWatch(path, mode), path)
                return
            except UnsupportedError:
                self._has_persistent_watches = False
        if mode is WatchMode.PERSISTENT_RECURSIVE:
            raise UnsupportedError("ZooKeeper before 3.6 does not watch whole trees", path=path)
        for what in OneShotWatch:
            with suppress(NoNodeError):  # then ZNODE tells when it comes, and both are renewed
                await self._answered(AddOneShotWatch(what, path), path)

    async def close(self) -> None:
        await self._session.close()

    async def _answered(self, request: Any, path: str) -> Any:
        """As ``_read``, but without end: a watch that fails would end its reader, who lost
        nothing."""
        return await until_answered(
            lambda: self._read(request, path),
            event="watch.unanswered",
            clock=self._clock,
            path=path,
        )

    async def _read(self, request: Any, path: str) -> Any:
        for _ in range(READ_TRIES_MAX):
            break_count = self._session.break_count
            try:
                return await self._ask(request)
            except ConnectionLoss as error:
                lost = error
                await self._session.wait_break_told(break_count)
            except SessionMovedError as error:
                lost = error
            except REPLY_ERRORS as error:
                raise error_of(error, path=path, is_write=False) from error
        raise UnavailableError("the connection broke again and again", path=path) from lost

    async def _write_one(self, operation: Operation) -> Any:
        check_size([operation], request_bytes_max=self.request_bytes_max)
        request = request_of(operation, is_secured=self._is_secured)
        return await self._write(request, operation.path)

    async def _write(self, request: Any, path: str) -> Any:
        try:
            return await self._ask(request)
        except REPLY_ERRORS as error:
            raise error_of(error, path=path, is_write=True) from error

    async def _ask(self, request: Any) -> Any:
        return await self._outbox.ask(request)
