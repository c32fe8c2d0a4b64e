"""Conversion of operations to kazoo's requests, and of kazoo's replies and errors back. No I/O."""

import re
import struct
from collections.abc import Sequence
from typing import Any

from kazoo import exceptions as kazoo
from kazoo.protocol import serialization
from kazoo.protocol.states import ZnodeStat
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

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
    UnsupportedError,
)
from ledgers.store import (
    Check,
    Create,
    Delete,
    MultiFailed,
    Operation,
    OperationResult,
    SetData,
    Stat,
)

REPLY_ERRORS = (kazoo.KazooException, RuntimeError, struct.error)
"""Errors that kazoo raises for a reply: the server's error, or a reply that kazoo cannot parse."""

_EPHEMERAL, _SEQUENTIAL = 1, 2
_ALWAYS_OPEN = re.compile(r"/(lostBookieRecoveryDelay|idgen-long|idgen-long/HOB-[0-9]+)$")
"""Znodes that BookKeeper creates without access control even in a secured cluster."""


def request_of(operation: Operation, *, is_secured: bool) -> Any:
    """Return kazoo's request for this operation, to be sent alone or in a transaction.

    ``is_secured``: only our authenticated identity may access a created znode, as with Java's
    ``zkEnableSecurity``.
    """
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


def stat_of(stat: ZnodeStat) -> Stat:
    return Stat(
        version=stat.version,
        czxid=stat.czxid,
        mzxid=stat.mzxid,
        ctime_ms=stat.ctime,
        mtime_ms=stat.mtime,
        ephemeral_owner=stat.ephemeralOwner,
        child_count=stat.numChildren,
    )


def results_of(operations: Sequence[Operation], replies: Sequence[Any]) -> list[OperationResult]:
    """Return the results of a transaction. Raises MultiFailed.

    If a transaction failed, every reply is an error. Operations before the failed one were rolled
    back (RolledBackError), and operations after it were not tried (RuntimeInconsistency).
    """
    for index, reply in enumerate(replies):
        if isinstance(reply, Exception) and not isinstance(reply, _BYSTANDERS):
            raise MultiFailed(index, error_of(reply, path=operations[index].path, is_write=True))
    return [
        _result_of(operation, reply) for operation, reply in zip(operations, replies, strict=True)
    ]


_BYSTANDERS = (kazoo.RolledBackError, kazoo.RuntimeInconsistency)


def _result_of(operation: Operation, reply: Any) -> OperationResult:
    match operation:
        case Create():
            return str(reply)
        case SetData():
            return stat_of(reply)
        case Delete() | Check():
            return None


def error_of(error: Exception, *, path: str, is_write: bool) -> BookmenderError:
    """Return our error for kazoo's ``error``. The caller raises it ``from error``."""
    if is_write and isinstance(error, _LOST_REPLIES):
        return UnknownOutcomeError("the reply to a write was lost", path=path)
    for kind, ours, message in _ERRORS:
        if isinstance(error, kind):
            return ours(message, path=path)
    return CorruptionError(
        "ZooKeeper answered what we do not understand", path=path, error=repr(error)
    )


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
        "ZooKeeper's ACL of this znode shuts us out: whoever it admits (getAcl tells) may open it with setAcl",
    ),
    (
        kazoo.InvalidACLError,
        UnauthorizedError,
        "ZooKeeper refuses our ACL: a secured cluster needs credentials",
    ),
    (kazoo.AuthFailedError, UnauthorizedError, "ZooKeeper refuses our credentials"),
    (
        kazoo.SessionClosedRequireSaslError,
        UnauthorizedError,
        "ZooKeeper admits only clients that authenticate themselves",
    ),
    (
        kazoo.QuotaExceededError,
        QuotaError,
        "ZooKeeper's quota of this path is used up: raise it (listquota and setquota of zkCli.sh)",
    ),
    (kazoo.BadArgumentsError, RejectedError, "ZooKeeper refuses the arguments"),
    (kazoo.MarshallingError, RejectedError, "ZooKeeper cannot read the request"),
    (kazoo.UnimplementedError, UnsupportedError, "this ZooKeeper server does not know the request"),
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
