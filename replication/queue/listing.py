"""Reading the whole queue, for people and for proofs: every mark, every lock, complete or an
error."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ledgers.errors import CorruptionError, NoNodeError, UnauthorizedError
from ledgers.operations.tasks import gather_in_parts
from ledgers.store import MetadataStore, children_if_any
from replication.queue import payloads
from replication.queue.payloads import Mark

T = TypeVar("T")

READS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedLedger:
    """``mark`` is None where the znode cannot be read as one, or ACLs shut it away: it may name any
    bookie. ``czxid``: when it was made, 0 where that is shut away, too.

    ``refusal``: what ZooKeeper says in the latter case, else empty. No worker that ACLs shut out
    likewise takes it.
    """

    ledger_id: int
    mark: Mark | None
    refusal: str = ""
    czxid: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedLedger:
    """A ledger that somebody holds. ``since_ms``: wall-clock time of ZooKeeper's.

    ``holder``: as it calls itself, None where that cannot be read. ``session_id``: 0 for a lock
    that somebody made by hand, and that goes with nobody. Of one that ACLs shut away these, and
    ``czxid``, are 0.
    """

    ledger_id: int
    holder: str | None
    since_ms: int
    session_id: int
    czxid: int = field(default=0, compare=False)


async def marked_ledger_ids(store: MetadataStore, ur: str) -> list[int]:
    """Ascending. Directories without a mark (left behind by a crash) are listed too."""
    return [ledger_id async for part in marked_in_parts(store, ur) for ledger_id in part]


async def marked_in_parts(store: MetadataStore, ur: str) -> AsyncIterator[list[int]]:
    """Likewise, up to 65,536 at a time."""
    marks = payloads.marks_path(ur)
    directories = [marks]
    for _ in range(3):
        directories = [
            f"{directory}/{name}"
            for directory in directories
            for name in sorted(await children_if_any(store, directory))
        ]
    for directory in directories:
        names = await children_if_any(store, directory)
        yield sorted(payloads.ledger_ids_below(directory[len(marks) + 1 :], names))


async def read_marks(
    store: MetadataStore, ur: str, ledger_ids: Sequence[int]
) -> list[MarkedLedger]:
    """Those of the ledgers that are marked, in order."""
    return await _read_each(partial(_read_mark, store, ur), ledger_ids)


async def locked_ledger_ids(store: MetadataStore, ur: str) -> set[int]:
    """Ledgers that some worker, ours or Java's, or a bookie's garbage collector holds now."""
    names = await children_if_any(store, payloads.locks_path(ur))
    return {i for name in names if (i := payloads.ledger_id_of_lock(name)) is not None}


async def read_locks(
    store: MetadataStore, ur: str, ledger_ids: Sequence[int]
) -> list[LockedLedger]:
    """Those of the ledgers that are locked, in order."""
    return await _read_each(partial(_read_lock, store, ur), ledger_ids)


async def _read_each(
    read: Callable[[int], Awaitable[T | None]], ledger_ids: Sequence[int]
) -> list[T]:
    """What ``read`` gives for each, in order, without the Nones; a bounded number at a time."""
    values = await gather_in_parts(read, ledger_ids, at_once=READS_AT_ONCE)
    return [value for value in values if value is not None]


async def _read_lock(store: MetadataStore, ur: str, ledger_id: int) -> LockedLedger | None:
    try:
        data, stat = await store.get(payloads.lock_path(ur, ledger_id))
    except NoNodeError:
        return None
    except UnauthorizedError:
        return LockedLedger(ledger_id=ledger_id, holder=None, since_ms=0, session_id=0)
    try:
        holder = payloads.parse_lock(data)
    except CorruptionError:
        holder = None
    return LockedLedger(
        ledger_id=ledger_id,
        holder=holder,
        since_ms=stat.ctime_ms,
        session_id=stat.ephemeral_owner,
        czxid=stat.czxid,
    )


async def _read_mark(store: MetadataStore, ur: str, ledger_id: int) -> MarkedLedger | None:
    try:
        data, stat = await store.get(payloads.mark_path(ur, ledger_id))
    except NoNodeError:
        return None
    except UnauthorizedError as error:
        return MarkedLedger(ledger_id=ledger_id, mark=None, refusal=str(error))
    try:
        mark = payloads.parse_mark(data)
    except CorruptionError:
        mark = None
    return MarkedLedger(ledger_id=ledger_id, mark=mark, czxid=stat.czxid)
