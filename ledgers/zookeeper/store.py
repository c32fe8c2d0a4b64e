"""The metadata store on ZooKeeper, through kazoo: one session, asynchronous and pipelined.

``ZooKeeperStore`` promises the behaviour of ``ledgers.store`` when the connection breaks during a
call:

- A read is sent again once the same session is connected again, up to ``READ_TRIES_MAX`` tries.
- The registration of a watch is sent again until it succeeds.
- A write raises UnknownOutcomeError, because the server may have applied it.
- After the session is lost, every call raises SessionLostError, including calls in flight. A write
  in flight may have been applied.

Calls made while SUSPENDED wait until the session is connected again or lost. Below the class, pure
functions convert operations to kazoo's requests, and kazoo's replies and errors back.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from kazoo import exceptions as kazoo
from kazoo.exceptions import ConnectionLoss, SessionMovedError
from kazoo.protocol import serialization
from kazoo.protocol.serialization import Exists, GetACL, GetChildren, GetData, Sync, Transaction
from kazoo.protocol.states import ZnodeStat
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from ledgers.clock import SystemClock
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    QuotaError,
    RejectedError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.security import OPEN, SecuritySettings, security_for
from ledgers.store import (
    EVENTS_MAX,
    READ_TRIES_MAX,
    REQUEST_BYTES_MAX,
    Check,
    Create,
    Delete,
    Event,
    EventKind,
    MetadataStore,
    MultiFailed,
    Operation,
    OperationResult,
    SetData,
    Stat,
)
from ledgers.tasks import in_daemon_thread, until_answered
from ledgers.zookeeper.flow import Outbox
from ledgers.zookeeper.kazoo_internals import AddWatch, MultiRead, RemoveWatches, WatchMode
from ledgers.zookeeper.kazoo_session import SASL_REQUIRED, KazooSession

READ_TOGETHER_MAX = 200
"""Largest number of znodes that ``get_each`` reads with one request."""
REPLY_ERRORS = (kazoo.KazooException, RuntimeError, struct.error)
"""Errors that kazoo raises for a reply: the server's error, or a reply that kazoo cannot parse."""


class ZooKeeperStore(MetadataStore):
    """A ``MetadataStore`` on one session. ``open`` it, and ``close`` it even if it is lost."""

    def __init__(
        self, session: KazooSession, *, is_secured: bool, request_bytes_max: int = REQUEST_BYTES_MAX
    ) -> None:
        """``is_secured``: only our identity may access the znodes that we create."""
        super().__init__(session, request_bytes_max=request_bytes_max)
        self._session: KazooSession = session
        self._is_secured = is_secured
        self._clock = SystemClock()
        self.outbox = Outbox(session)

    @classmethod
    async def open(
        cls,
        hosts: str,
        *,
        session_timeout_s: float = 10.0,
        connect_timeout_s: float = 10.0,
        security: SecuritySettings = OPEN,
        ends_with_loop: bool = False,
        request_bytes_max: int = REQUEST_BYTES_MAX,
    ) -> ZooKeeperStore:
        """Open a new session and return its store. ``hosts``: ``host:port`` joined by commas.
        ``ends_with_loop``: end the session if the event loop is blocked for three session timeouts,
        so that its locks become free. ``request_bytes_max``: the servers' jute.maxbuffer.

        Raises UnavailableError (no answer), UnauthorizedError, SettingsError, UnsupportedError
        (before 3.6).
        """
        if security != OPEN:
            await in_daemon_thread(security_for(security).check)
        session = KazooSession(
            hosts,
            session_timeout_s=session_timeout_s,
            security=security_for(security),
            ends_with_loop=ends_with_loop,
        )
        await session.open(timeout_s=connect_timeout_s)
        return cls(
            session,
            is_secured=security.zookeeper_acl == "creator",
            request_bytes_max=request_bytes_max,
        )

    async def get(self, path: str) -> tuple[bytes, Stat]:
        data, stat = await self._read(GetData(path, None), path)
        return data or b"", stat_of(stat)  # None: a znode that was created without data

    async def get_each(
        self, paths: Sequence[str]
    ) -> list[tuple[bytes, Stat] | NoNodeError | UnauthorizedError]:
        size = READ_TOGETHER_MAX
        parts = [paths[start : start + size] for start in range(0, len(paths), size)]
        await self.outbox.give_way()
        replies = await asyncio.gather(*(self._read(MultiRead(part), part[0]) for part in parts))
        return [
            _got(reply, path)
            for part, found in zip(parts, replies, strict=True)
            for path, reply in zip(part, found, strict=True)
        ]

    async def exists(self, path: str) -> Stat | None:
        stat = await self._read(Exists(path, None), path)
        return None if stat is None else stat_of(stat)

    async def children(self, path: str) -> list[str]:
        names: list[str] = await self._read(GetChildren(path, None), path)
        return names

    async def sync(self, path: str) -> None:
        await self._read(Sync(path), path)

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
                    if event.kind is EventKind.RESET:  # a new connection has no watches
                        # An UnavailableError here would end the reader, although no event was lost.
                        await until_answered(
                            lambda: self._read(AddWatch(path, mode), path),
                            event="watch.request_failed",
                            clock=self._clock,
                            path=path,
                        )
                    yield event
            finally:
                if self._session.subscription_count(path) == 1:
                    self._session.send_without_reply(RemoveWatches(path))

    async def is_restricted(self, path: str) -> bool | None:
        """Return False if everybody has all permissions on the znode; None if there is no znode."""
        try:
            acls, _ = await self._read(GetACL(path), path)
        except NoNodeError:
            return None
        except UnauthorizedError:
            return True
        return OPEN_ACL_UNSAFE[0] not in acls

    async def close(self) -> None:
        await self._session.close()

    async def _read(self, request: Any, path: str) -> Any:
        for _ in range(READ_TRIES_MAX):
            break_count = self._session.break_count
            try:
                return await self.outbox.ask(request)
            except ConnectionLoss as error:
                lost = error
                await self._session.wait_break_reported(break_count)
            except SessionMovedError as error:
                lost = error
            except REPLY_ERRORS as error:
                raise error_of(error, path=path, is_write=False) from error
        raise UnavailableError("the connection broke again and again", path=path) from lost

    async def _send(
        self, operations: Sequence[Operation], *, is_multi: bool
    ) -> list[OperationResult]:
        requests = [request_of(each, is_secured=self._is_secured) for each in operations]
        try:
            if is_multi:
                replies = await self.outbox.ask(Transaction(requests))
            else:
                replies = [await self.outbox.ask(requests[0])]
        except REPLY_ERRORS as error:
            raise error_of(error, path=operations[0].path, is_write=True) from error
        return results_of(operations, replies)


_EPHEMERAL, _SEQUENTIAL = 1, 2
_ALWAYS_OPEN = re.compile(r"/(lostBookieRecoveryDelay|idgen-long|idgen-long/HOB-[0-9]+)$")
"""Znodes that BookKeeper creates without access control even in a secured cluster."""


def request_of(operation: Operation, *, is_secured: bool) -> Any:
    """Return kazoo's request for this operation, alone or in a transaction. ``is_secured``: only
    our identity may access a created znode, as with Java's ``zkEnableSecurity``."""
    match operation:
        case Create(path=path, data=data):
            is_open = not is_secured or _ALWAYS_OPEN.search(path)
            return serialization.Create(
                path,
                data,
                OPEN_ACL_UNSAFE if is_open else CREATOR_ALL_ACL,
                _EPHEMERAL * operation.is_ephemeral | _SEQUENTIAL * operation.is_sequential,
            )
        case SetData(path=path, data=data, version=version):
            return serialization.SetData(path, data, version)
        case Delete(path=path, version=version):
            return serialization.Delete(path, version)
        case Check(path=path, version=version):
            return serialization.CheckVersion(path, version)


def _got(reply: Any, path: str) -> tuple[bytes, Stat] | NoNodeError | UnauthorizedError:
    """Return one element of the reply to a MultiRead."""
    if not isinstance(reply, Exception):
        return reply[0] or b"", stat_of(reply[1])
    error = error_of(reply, path=path, is_write=False)
    if not isinstance(error, NoNodeError | UnauthorizedError):
        raise error from reply
    return error


def stat_of(stat: ZnodeStat) -> Stat:
    return Stat(
        version=stat.version,
        czxid=stat.czxid,
        mzxid=stat.mzxid,
        pzxid=stat.pzxid,
        cversion=stat.cversion,
        ctime_ms=stat.ctime,
        mtime_ms=stat.mtime,
        ephemeral_owner=stat.ephemeralOwner,
        child_count=stat.numChildren,
    )


def results_of(operations: Sequence[Operation], replies: Sequence[Any]) -> list[OperationResult]:
    """Return the results of a transaction. Raises MultiFailed: then every reply is an error,
    RolledBackError before the failed operation and RuntimeInconsistency after it."""
    for index, reply in enumerate(replies):
        if isinstance(reply, Exception) and not isinstance(reply, _BYSTANDERS):
            raise MultiFailed(index, error_of(reply, path=operations[index].path, is_write=True))
    results: list[OperationResult] = []
    for operation, reply in zip(operations, replies, strict=True):
        match operation:
            case Create():
                results.append(str(reply))
            case SetData():
                results.append(stat_of(reply))
            case Delete() | Check():
                results.append(None)
    return results


_BYSTANDERS = (kazoo.RolledBackError, kazoo.RuntimeInconsistency)


def error_of(error: Exception, *, path: str, is_write: bool) -> BookmenderError:
    """Return our error for kazoo's ``error``. The caller raises it ``from error``."""
    if is_write and isinstance(error, _LOST_REPLIES):
        return UnknownOutcomeError("the reply to a write was lost", path=path)
    for kind, ours, message in _ERRORS:
        if isinstance(error, kind):
            return ours(message, path=path)
    return CorruptionError("unexpected answer from ZooKeeper", path=path, error=repr(error))


_LOST_REPLIES = (kazoo.ConnectionLoss, kazoo.OperationTimeoutError, kazoo.RequestTimeoutError)
_ERRORS: tuple[tuple[type[Exception], type[BookmenderError], str], ...] = (
    (kazoo.NoNodeError, NoNodeError, "there is no such znode"),
    (kazoo.NodeExistsError, NodeExistsError, "there is such a znode already"),
    (kazoo.BadVersionError, ConflictError, "the znode is at another version"),
    (kazoo.NotEmptyError, NotEmptyError, "the znode has children"),
    (kazoo.NoChildrenForEphemeralsError, RejectedError, "an ephemeral znode has no children"),
    (
        kazoo.NoAuthError,
        UnauthorizedError,
        "ZooKeeper's ACL of this znode denies access. Check security.zookeeper_user; or a user "
        "with permission can change the ACL with setAcl (see getAcl)",
    ),
    (
        kazoo.InvalidACLError,
        UnauthorizedError,
        "ZooKeeper refuses our ACL, because it does not know who we are: set "
        "security.zookeeper_user, or security.zookeeper_tls with a certificate",
    ),
    (kazoo.AuthFailedError, UnauthorizedError, "ZooKeeper refuses our credentials"),
    (kazoo.SessionClosedRequireSaslError, UnauthorizedError, SASL_REQUIRED),
    (
        kazoo.QuotaExceededError,
        QuotaError,
        "ZooKeeper's quota of this path is used up: raise it (listquota and setquota of zkCli.sh)",
    ),
    (kazoo.BadArgumentsError, RejectedError, "ZooKeeper refuses the arguments"),
    (kazoo.MarshallingError, RejectedError, "ZooKeeper cannot read the request"),
    (kazoo.SessionExpiredError, SessionLostError, "the ZooKeeper session is lost"),
    (kazoo.ConnectionLoss, UnavailableError, "the connection broke again and again"),
    (kazoo.OperationTimeoutError, UnavailableError, "ZooKeeper did not finish in time"),
    (kazoo.RequestTimeoutError, UnavailableError, "ZooKeeper did not finish in time"),
    (kazoo.ThrottledOpError, UnavailableError, "ZooKeeper is overloaded"),
    (kazoo.SessionMovedError, UnavailableError, "the session has moved to another server"),
    (kazoo.NotReadOnlyCallError, UnavailableError, "this ZooKeeper server is read-only now"),
    (kazoo.NewConfigNoQuorumError, UnavailableError, "ZooKeeper is being reconfigured"),
    (kazoo.ReconfigInProcessError, UnavailableError, "ZooKeeper is being reconfigured"),
)
