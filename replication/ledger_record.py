"""What nodes and commands record in ZooKeeper about single ledgers, as versioned JSON.

- ``WaitingNote``, ``<ur>/bookmender/waiting/<ledger id>``: why a marked ledger is not repaired now, as
  a reason and facts, and when the next try is due. The worker that deferred the ledger writes the
  note, and all nodes follow it, so that N nodes do not try N times. It is deleted when the ledger is
  repaired. A note without a mark, or older than the mark, means nothing: Java's workers delete marks
  and know no notes. Readers ignore such a note, and an idle worker, or the next one that leases the
  ledger, deletes it.
- ``UnprovenEnd``, ``<ur>/bookmender/unproven/<ledger id>``: a ledger whose end could not be proven.
  When its remaining entries have their copies, its mark is deleted, and its end is tried again only
  when a bookie of it disappears or a person asks. So the worker leaves this record for people.
- ``GivenUpEntries``, ``<ur>/bookmender/given_up/<ledger id>``: the entries that an operator gave up
  when closing a ledger. It is written before CLOSED, and it stays.

``ClusterFingerprint`` is the part of a note that tells when a retry may help before its time: a
bookie registered, or an order changed. That a bookie disappeared seldom helps. Each new
registration has a greater czxid than all earlier ones, so registrations tell the two cases apart.
"""

import asyncio
import hashlib
import json
import random
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self

import structlog

from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    NoSuchLedgerError,
    UnauthorizedError,
)
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.store import ANY_VERSION, Check, Create, Delete, MetadataStore, MultiFailed, SetData
from ledgers.tasks import gather_in_parts
from replication.cluster import ClusterView
from replication.locks import guarded_multi
from replication.reasons import Blocked, Facts, Reason, named, parse_blocked
from replication.transactions import Batcher
from replication.znodes import (
    ACL_HINT,
    ClusterPaths,
    children_if_allowed,
    ensure_znode,
    int_field,
    ledger_id_of_name,
    object_field,
    parse_record,
    read_record,
    text_field,
    texts_field,
    time_field,
)

READ_MAX = 1_000
"""Ledgers whose metadata is read again at once. For further ones the records are believed."""
UNPROVEN_ENDS_READ_AT_ONCE = 100


# --- Ends that cannot be proven -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprovenEnd:
    """``facts``: why the end could not be proven. ``tried_ms``: wall-clock time of the last try."""

    ledger_id: int
    facts: Facts
    tried_ms: int

    @property
    def blocked(self) -> Blocked:
        return Blocked(reason=Reason.END_UNPROVEN, facts=self.facts)

    def to_json(self) -> bytes:
        record = {
            "version": 1,
            "ledger_id": self.ledger_id,
            **self.blocked.to_record(),
            "tried_ms": self.tried_ms,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_record(cls, ledger_id: int, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            ledger_id=ledger_id,
            facts=parse_blocked(record).facts,
            tried_ms=time_field(record, "tried_ms"),
        )


async def read_unproven_end(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int
) -> UnprovenEnd | None:
    """Return the record of the last try, even if the ledger is closed by now; None if there is none
    or it cannot be read."""
    parse = partial(UnprovenEnd.from_record, ledger_id)
    return await read_record(store, paths.unproven_end(ledger_id), parse)


async def unproven_ledger_ids(
    store: MetadataStore, manager: LedgerManager, paths: ClusterPaths
) -> list[int]:
    """Return the recorded ledgers that are not closed yet, in order."""
    recorded = await _recorded(store, paths)
    looked_at, rest = recorded[:READ_MAX], recorded[READ_MAX:]
    return await _still_open(manager, looked_at) + rest


async def unproven_among(
    store: MetadataStore, manager: LedgerManager, paths: ClusterPaths, ledger_ids: Collection[int]
) -> list[UnprovenEnd]:
    """Return the records of those of these ledgers that are not closed yet, in order."""
    recorded = set(await _recorded(store, paths)).intersection(ledger_ids)
    still_open = await _still_open(manager, sorted(recorded))
    ends = await asyncio.gather(*(read_unproven_end(store, paths, i) for i in still_open))
    return [end for end in ends if end is not None]


class UnprovenEnds:
    """Writes the records for a worker. The guards of ``batcher`` prove its session (rule S3)."""

    def __init__(
        self,
        store: MetadataStore,
        batcher: Batcher,
        paths: ClusterPaths,
        *,
        manager: LedgerManager,
        clock: Clock,
    ) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths
        self._manager = manager
        self._clock = clock

    async def note(self, ledger_id: int, facts: Facts) -> None:
        """Write the record of the last try, in place of an earlier one."""
        end = UnprovenEnd(ledger_id=ledger_id, facts=facts, tried_ms=self._clock.wall_ms())
        path, data = self._paths.unproven_end(ledger_id), end.to_json()
        try:
            await self._batcher.put(path, data)
        except NoNodeError:  # the first record
            await ensure_znode(self._store, self._paths.unproven_ends)
            await self._batcher.put(path, data)

    async def tidy(self, rng: random.Random) -> None:
        """Delete the records of ledgers that are closed or deleted. Of many records it checks some
        at random."""
        recorded = await _recorded(self._store, self._paths)
        some = rng.sample(recorded, min(len(recorded), READ_MAX))
        over = set(some).difference(await _still_open(self._manager, some))
        await asyncio.gather(*map(self._delete, sorted(over)))

    async def _delete(self, ledger_id: int) -> None:
        with suppress(NoNodeError):  # another node deleted it
            await self._batcher.apply(Delete(path=self._paths.unproven_end(ledger_id)))


async def _recorded(store: MetadataStore, paths: ClusterPaths) -> list[int]:
    names = await children_if_allowed(store, paths.unproven_ends)
    return sorted(i for i in map(ledger_id_of_name, names) if i is not None)


async def _still_open(manager: LedgerManager, ledger_ids: Sequence[int]) -> list[int]:
    """Return the ledgers that are not closed. A ledger that cannot be read may be open."""

    async def is_open(ledger_id: int) -> bool:
        try:
            return not (await manager.read(ledger_id)).metadata.is_closed
        except NoSuchLedgerError:
            return False
        except (CorruptionError, UnauthorizedError):
            return True

    are_open = await gather_in_parts(is_open, ledger_ids, at_once=UNPROVEN_ENDS_READ_AT_ONCE)
    return [i for i, is_so in zip(ledger_ids, are_open, strict=True) if is_so]


# --- Entries that were given up -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpEntries:
    """The first and the last entry, both inclusive. ``replies``: what bookies answered for the
    first one. ``by``: the user and host of the command. ``at_ms``: wall-clock time."""

    first_entry_id: int
    last_entry_id: int
    replies: str
    by: str
    at_ms: int

    def to_json(self) -> bytes:
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            first_entry_id=int_field(record, "first_entry_id"),
            last_entry_id=int_field(record, "last_entry_id"),
            replies=text_field(record, "replies"),
            by=text_field(record, "by"),
            at_ms=time_field(record, "at_ms"),
        )


async def read_given_up(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int
) -> GivenUpEntries | None:
    """Return the record; None if nothing was given up, or if it cannot be read."""
    return await read_record(store, paths.given_up(ledger_id), GivenUpEntries.from_record)


async def record_given_up(
    store: MetadataStore,
    paths: ClusterPaths,
    ledger_id: int,
    entries: GivenUpEntries,
    *,
    guards: Sequence[Check],
) -> None:
    """Write the record, in place of one of an earlier attempt. Raises LockLostError,
    UnavailableError, RejectedError."""
    path = paths.given_up(ledger_id)
    await ensure_znode(store, path.rpartition("/")[0])
    is_there = await store.exists(path) is not None
    write = (
        SetData(path=path, data=entries.to_json(), version=ANY_VERSION)
        if is_there
        else Create(path=path, data=entries.to_json())
    )
    try:
        await guarded_multi(store, guards, [write], ledger_id=ledger_id)
    except MultiFailed as failure:
        raise failure.cause from failure


# --- When a retry may help ------------------------------------------------------------------------

_ANY_CHANGE_HELPS = frozenset(
    {
        # When an unresponsive bookie becomes absent, the ledger is repaired without it.
        Reason.NO_ANSWER,
        Reason.RECOVERY_FAILED,
        Reason.CONFLICTS,
        # These waits are long, and another bookie of the ledger may be missing now. Its entries are
        # repaired without waiting for the first one.
        Reason.MAINTENANCE,
        Reason.NO_COPY,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFingerprint:
    """Bookies and orders at one moment. The two hashes are eight hexadecimal digits each."""

    newest_czxid: int
    """The greatest czxid of all registrations; 0 if there is none."""
    bookies: str
    """Hash of the registered bookies and the czxids of their registrations."""
    orders: str
    """Hash of draining bookies, maintenance windows with their ends, safety hold and trusted
    cookies."""

    @classmethod
    def of(cls, view: ClusterView) -> Self:
        lives = {bookie: view.czxid(bookie) for bookie in view.available}
        draining = [(b, o.since_ms, o.may_fence) for b, o in view.orders.draining.items()]
        maintenance = [(b, w.until_ms) for b, w in view.orders.maintenance.items()]
        return cls(
            newest_czxid=max(lives.values(), default=0),
            bookies=_fingerprint(sorted(lives.items())),
            orders=_fingerprint(
                [sorted(draining), sorted(maintenance), *_hold(view), *_trust(view)]
            ),
        )

    def warrants_retry(self, then: "ClusterFingerprint", reason: Reason | None) -> bool:
        """Return True if a retry may succeed now, after a try at ``then`` failed for ``reason``."""
        return (
            self.newest_czxid > then.newest_czxid
            or self.orders != then.orders
            or (reason in _ANY_CHANGE_HELPS and self.bookies != then.bookies)
        )

    def to_record(self) -> dict[str, Any]:
        return {
            "newest_czxid": self.newest_czxid,
            "bookies": self.bookies,
            "orders": self.orders,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            newest_czxid=int_field(record, "newest_czxid"),
            bookies=text_field(record, "bookies"),
            orders=text_field(record, "orders"),
        )


def _hold(view: ClusterView) -> list[int]:
    """Return when the safety hold began; nothing without one."""
    hold = view.orders.hold
    return [] if hold is None or not view.orders.is_held else [hold.since_ms]


def _trust(view: ClusterView) -> list[tuple[BookieId, int]]:
    """Return the cookies that an order trusts: with it, more ends may be provable."""
    return sorted(view.orders.trusted_cookies.items())


def _fingerprint(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


# --- Notes ----------------------------------------------------------------------------------------

log = structlog.get_logger()

READS_AT_ONCE = 500
LET_GO_TRIES_MAX = 5
"""A node that writes the note again so often tries the ledger anyway."""
BINDING_MAX_MS = 86_400_000
"""A note delays the next try by a day at most, in case the clock of its node was wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingNote:
    """Why a ledger was blocked at the last of ``tries``, and when the next try is due.

    Times are wall-clock milliseconds of the node that wrote the note. ``node``: its host, for
    people. ``since_ms``: the first try that failed for this reason.
    """

    ledger_id: int
    blocked: Blocked
    node: str
    since_ms: int
    tries: int = 1
    next_try_ms: int = 0
    """0: at any time, for example while a worker holds the lock."""
    grace_until_ms: int = 0
    """When the grace ends for which the ledger waits under a worker's lock; 0: there is none. Other
    nodes do not wait for it."""
    fingerprint: ClusterFingerprint | None = None
    """The cluster when that try began."""
    suspects: frozenset[BookieId] = frozenset()
    """Bookies whose copies were found bad while copying from them. The next try reads them
    completely."""
    mzxid: int | None = field(default=None, compare=False)
    """The last write of the znode that it was read from."""
    written_ms: int | None = field(default=None, compare=False)
    """The same, by ZooKeeper's clock."""

    @property
    def reason(self) -> Reason:
        return self.blocked.reason

    def is_older_than(self, mark_czxid: int) -> bool:
        """Return True if the note was written before that mark was created, so that it belongs to
        an earlier mark.

        The last write of the note counts, because an existing note is written again for the next
        mark. The creation of the mark counts, because the leader adds bookies to an existing one.
        """
        return self.mzxid is not None and self.mzxid < mark_czxid

    def let_go(self) -> Self:
        """Return the note of a ledger that is due at once, whatever blocked it.

        ``suspects`` stays: a worker that does not know of them checks only the ends of their
        copies, and would find the ledger whole.
        """
        return replace(
            self,
            blocked=Blocked(
                reason=Reason.LEFT_TO_OTHERS, facts=Facts(lacking=named(self.suspects))
            ),
            tries=1,
            next_try_ms=0,
            fingerprint=None,
        )

    def wait_ms(self, *, now_ms: int, fingerprint: ClusterFingerprint) -> int:
        """Return how long the next try must still wait; 0 if it is due. ``fingerprint``: the
        cluster now."""
        if self.reason.is_of_this_node or self.fingerprint is None:
            return 0
        if fingerprint.warrants_retry(self.fingerprint, self.reason):
            return 0
        wait_ms = min(max(0, self.next_try_ms - now_ms), BINDING_MAX_MS)
        if self.written_ms is not None:  # otherwise each look would wait for another day
            wait_ms = min(wait_ms, max(0, self.written_ms + BINDING_MAX_MS - now_ms))
        return wait_ms

    def is_overtaken(self, *, now_ms: int, fingerprint: ClusterFingerprint) -> bool:
        """Return True if the cluster has changed so that the ledger is tried before its time."""
        if self.reason.is_of_this_node or self.fingerprint is None:
            return False
        is_in_grace = self.reason.is_a_grace and now_ms < self.grace_until_ms
        return not is_in_grace and fingerprint.warrants_retry(self.fingerprint, self.reason)

    def tries_for(self, reason: Reason, *, fingerprint: ClusterFingerprint) -> int:
        """Return how often the ledger failed in a row for this reason, without a change that
        warrants a retry."""
        if self.reason is not reason or self.fingerprint is None:
            return 0
        return 0 if fingerprint.warrants_retry(self.fingerprint, reason) else self.tries

    def to_json(self) -> bytes:
        record = {
            "version": 1,
            "ledger_id": self.ledger_id,
            **self.blocked.to_record(),
            "node": self.node,
            "since_ms": self.since_ms,
            "tries": self.tries,
            "next_try_ms": self.next_try_ms,
            "grace_until_ms": self.grace_until_ms,
            "cluster": None if self.fingerprint is None else self.fingerprint.to_record(),
            "suspects": sorted(self.suspects),
        }
        return json.dumps(record).encode()

    @classmethod
    def from_record(cls, ledger_id: int, record: dict[str, Any]) -> Self:
        """Raises CorruptionError, also for a reason that this release does not know."""
        has_fingerprint = record.get("cluster") is not None
        return cls(
            ledger_id=ledger_id,
            blocked=parse_blocked(record),
            node=text_field(record, "node"),
            since_ms=time_field(record, "since_ms"),
            tries=int_field(record, "tries"),
            next_try_ms=time_field(record, "next_try_ms"),
            grace_until_ms=time_field(record, "grace_until_ms"),
            fingerprint=ClusterFingerprint.from_record(object_field(record, "cluster"))
            if has_fingerprint
            else None,
            suspects=frozenset(map(BookieId, texts_field(record, "suspects"))),
        )


class WaitingNotes:
    """Reads the notes of all nodes, and releases ledgers from theirs."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths) -> None:
        self._store = store
        self._paths = paths

    async def are_any(self) -> bool:
        """Return True if there is any note. This costs less than listing their names."""
        path = self._paths.waiting
        try:
            stat = await self._store.exists(path)
        except UnauthorizedError as error:
            log.warning("record.access_denied", path=path, error=str(error), next_step=ACL_HINT)
            return False
        return stat is not None and stat.child_count > 0

    async def ledger_ids(self) -> set[int]:
        """Return the ledgers that have a note."""
        names = await children_if_allowed(self._store, self._paths.waiting)
        return {i for i in map(ledger_id_of_name, names) if i is not None}

    async def read(self, ledger_id: int) -> WaitingNote | None:
        """Return the note; None if there is none, this release cannot read it, or an ACL denies
        access."""
        try:
            data, stat = await self._store.get(self._paths.waiting_note(ledger_id))
            note = WaitingNote.from_record(ledger_id, parse_record(data))
        except (NoNodeError, CorruptionError, UnauthorizedError):
            return None
        return replace(note, mzxid=stat.mzxid, written_ms=stat.mtime_ms)

    async def version(self, ledger_id: int) -> int | None:
        """Return the version of the note's znode; None if there is none."""
        stat = await self._store.exists(self._paths.waiting_note(ledger_id))
        return None if stat is None else stat.version

    async def read_all(self, ledger_ids: Sequence[int]) -> list[WaitingNote]:
        """Return the readable notes of these ledgers, in order."""
        notes = await gather_in_parts(self.read, ledger_ids, at_once=READS_AT_ONCE)
        return [note for note in notes if note is not None]

    async def let_go(
        self, ledger_id: int, *, guards: Sequence[Check], beside: WaitingNote | None = None
    ) -> None:
        """Make the ledger due at once. Delete its note, unless the note or ``beside`` names bad
        sources.

        ``beside``: a note to write instead. ``guards``: prove that the caller may do this (rule
        S3). Raises LockLostError if they fail.
        """
        path = self._paths.waiting_note(ledger_id)
        for _ in range(LET_GO_TRIES_MAX):
            operation = await self._letting_go(path, ledger_id, beside)
            if operation is None:
                return
            try:
                await guarded_multi(self._store, guards, [operation], ledger_id=ledger_id)
                return
            except MultiFailed as failure:
                if not isinstance(failure.cause, ConflictError | NoNodeError | NodeExistsError):
                    raise failure.cause from failure
                if isinstance(operation, Create) and isinstance(failure.cause, NoNodeError):
                    await ensure_znode(self._store, self._paths.waiting)  # somebody deleted it

    async def _letting_go(
        self, path: str, ledger_id: int, beside: WaitingNote | None
    ) -> Create | SetData | Delete | None:
        left, version = beside, ANY_VERSION
        try:
            data, stat = await self._store.get(path)
            version = stat.version
            note = WaitingNote.from_record(ledger_id, parse_record(data))
        except NoNodeError:
            return None if left is None else Create(path=path, data=left.to_json())
        except (CorruptionError, UnauthorizedError):  # nobody can read it
            pass
        else:
            if left is not None:
                left = replace(left, suspects=left.suspects | note.suspects)
            elif note.suspects:
                left = note.let_go()
        if left is None:
            return Delete(path=path, version=version)
        return SetData(path=path, data=left.to_json(), version=version)


class WaitingNotesWriter(WaitingNotes):
    """Writes the notes of a worker. The guards of ``batcher`` prove its session (rule S3)."""

    def __init__(self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths) -> None:
        super().__init__(store, paths)
        self._batcher = batcher

    async def write(self, note: WaitingNote, *, is_likely_there: bool = False) -> None:
        """Write the note, in place of an existing one. ``is_likely_there``: saves a request if it
        is right."""
        path, data = self._paths.waiting_note(note.ledger_id), note.to_json()
        create, change = (
            Create(path=path, data=data),
            SetData(path=path, data=data, version=ANY_VERSION),
        )
        first, second = (change, create) if is_likely_there else (create, change)
        if not (await self._commit(first) or await self._commit(second)):
            # Others deleted and created it at the wrong moments, or deleted its parent.
            await ensure_znode(self._store, self._paths.waiting)
            await self._commit(create)

    async def delete(self, ledger_id: int, *, version: int = ANY_VERSION) -> None:
        """Delete the note, if it exists and has this version."""
        await self._commit(Delete(path=self._paths.waiting_note(ledger_id), version=version))

    async def _commit(self, operation: Create | SetData | Delete) -> bool:
        """Return False if another node created, changed or deleted the note first."""
        try:
            await self._batcher.apply(operation)
        except (NodeExistsError, NoNodeError, ConflictError):
            return False
        return True
