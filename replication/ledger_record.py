"""Why a marked ledger is not being repaired now: notes that all nodes and commands can read.

One znode a ledger, ``<ur>/bookmender/waiting/<ledger id>``, written by the worker that put the
ledger aside and deleted when it is done. All nodes keep to what it says of the next try, so that N
nodes do not try N times. A note without a mark means nothing, nor does one that is older than the
mark beside it (Java's workers unmark a ledger and know of no notes): readers skip it, and an idle
worker, or who takes the ledger, deletes it.

Ledgers whose end cannot be proven: ``<ur>/bookmender/unproven/<ledger id>``, versioned JSON.

Once what is left of such a ledger has its copies again it is marked no more, and nobody tries its
end anew before a bookie of it goes, or a person asks. So whoever tried it in vain leaves a record,
for people. A ledger that was closed meanwhile, or deleted, is passed over by readers, and its
record is deleted by an idle worker.

Entries that an operator gave up when a ledger was closed: ``<ur>/bookmender/given_up/<ledger
id>``.

Versioned JSON, one record a ledger, for people who ask later why a ledger ends where it does. It is
written before CLOSED, so that no entry is given up without a record; it stays.

What a ledger that cannot be repaired waits for, boiled down so that it fits into its note.

A try that failed is worth repeating before its time when a bookie came or came back, or an order of
the operator's changed; that a bookie went seldom helps, but may be one more that is to be replaced.
Registrations tell the two apart by themselves: each new one has a greater czxid than all before it.
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
from replication.reasons import Reason
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
"""Ledgers that are looked at again in one go; further ones are taken for what their records say."""
UNPROVEN_ENDS_READ_AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprovenEnd:
    """``detail``: a sentence for an operator. ``tried_ms``: wall-clock, of the last try."""

    ledger_id: int
    detail: str
    tried_ms: int

    def to_json(self) -> bytes:
        record = {
            "version": 1,
            "ledger_id": self.ledger_id,
            "detail": self.detail,
            "tried_ms": self.tried_ms,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_record(cls, ledger_id: int, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            ledger_id=ledger_id,
            detail=text_field(record, "detail"),
            tried_ms=time_field(record, "tried_ms"),
        )


async def read_unproven_end(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int
) -> UnprovenEnd | None:
    """What the last try left, be the ledger closed by now or not; None where that cannot be read
    either."""
    parse = partial(UnprovenEnd.from_record, ledger_id)
    return await read_record(store, paths.unproven_end(ledger_id), parse)


async def unproven_ledger_ids(
    store: MetadataStore, manager: LedgerManager, paths: ClusterPaths
) -> list[int]:
    """Those that are not closed yet, by id."""
    recorded = await _recorded(store, paths)
    looked_at, rest = recorded[:READ_MAX], recorded[READ_MAX:]
    return await _still_open(manager, looked_at) + rest


async def unproven_among(
    store: MetadataStore, manager: LedgerManager, paths: ClusterPaths, ledger_ids: Collection[int]
) -> list[UnprovenEnd]:
    """What was left of those of these ledgers that are not closed yet, by id."""
    recorded = set(await _recorded(store, paths)).intersection(ledger_ids)
    still_open = await _still_open(manager, sorted(recorded))
    ends = await asyncio.gather(*(read_unproven_end(store, paths, i) for i in still_open))
    return [end for end in ends if end is not None]


class UnprovenEnds:
    """The records, for a worker: ``batcher``'s guards prove its session (rule S3)."""

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

    async def note(self, ledger_id: int, detail: str) -> None:
        """In place of what an earlier try left."""
        end = UnprovenEnd(ledger_id=ledger_id, detail=detail, tried_ms=self._clock.wall_ms())
        path, data = self._paths.unproven_end(ledger_id), end.to_json()
        try:
            await self._batcher.put(path, data)
        except NoNodeError:  # the first that there is
            await ensure_znode(self._store, self._paths.unproven_ends)
            await self._batcher.put(path, data)

    async def tidy(self, rng: random.Random) -> None:
        """Delete the records of ledgers that are closed, or gone: some of them, where there are
        many."""
        recorded = await _recorded(self._store, self._paths)
        some = rng.sample(recorded, min(len(recorded), READ_MAX))
        over = set(some).difference(await _still_open(self._manager, some))
        await asyncio.gather(*map(self._delete, sorted(over)))

    async def _delete(self, ledger_id: int) -> None:
        with suppress(NoNodeError):  # another node's hand
            await self._batcher.apply(Delete(path=self._paths.unproven_end(ledger_id)))


async def _recorded(store: MetadataStore, paths: ClusterPaths) -> list[int]:
    names = await children_if_allowed(store, paths.unproven_ends)
    return sorted(i for i in map(ledger_id_of_name, names) if i is not None)


async def _still_open(manager: LedgerManager, ledger_ids: Sequence[int]) -> list[int]:
    """What cannot be read may be open."""

    async def is_open(ledger_id: int) -> bool:
        try:
            return not (await manager.read(ledger_id)).metadata.is_closed
        except NoSuchLedgerError:
            return False
        except (CorruptionError, UnauthorizedError):
            return True

    are_open = await gather_in_parts(is_open, ledger_ids, at_once=UNPROVEN_ENDS_READ_AT_ONCE)
    return [i for i, is_so in zip(ledger_ids, are_open, strict=True) if is_so]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpEntries:
    """From the first to the last, both inclusive. ``replies``: what bookies said of the first one.
    ``by``: the user and host of the command. ``at_ms``: wall-clock."""

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
    """None where nothing was given up, or the record cannot be read."""
    return await read_record(store, paths.given_up(ledger_id), GivenUpEntries.from_record)


async def record_given_up(
    store: MetadataStore,
    paths: ClusterPaths,
    ledger_id: int,
    entries: GivenUpEntries,
    *,
    guards: Sequence[Check],
) -> None:
    """Write the record, in place of an earlier attempt's. Raises LockLostError, UnavailableError,
    RejectedError."""
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


_ANY_CHANGE_HELPS = frozenset(
    {
        # Once a bookie that hangs counts as gone, the ledger is repaired without it.
        Reason.NO_ANSWER,
        Reason.RECOVERY_FAILED,
        Reason.CONFLICTS,
        # The rest of the ledger was repaired, and is to be again, whoever goes: these waits are
        # long.
        Reason.MAINTENANCE,
        Reason.NO_COPY,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFingerprint:
    """Bookies and orders at one moment. The two fingerprints are eight hexadecimal digits each."""

    newest_czxid: int
    """Of the bookies' registrations; 0 without any."""
    bookies: str
    """Fingerprint of who is there, and in which life."""
    orders: str
    """Fingerprint of which bookies drain, or are under maintenance, and until when; of a hold; and
    of trusted cookies."""

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
        """Whether what failed then for that reason is worth a try before its time."""
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
    """When the hold that stands began; without one nothing, as in the releases that knew of
    none."""
    hold = view.orders.hold
    return [] if hold is None or not view.orders.is_held else [hold.since_ms]


def _trust(view: ClusterView) -> list[tuple[BookieId, int]]:
    """The cookies that an order trusts: an end that could not be proven may be provable now.
    Without an order nothing."""
    return sorted(view.orders.trusted_cookies.items())


def _fingerprint(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


log = structlog.get_logger()

READS_AT_ONCE = 500
LET_GO_TRIES_MAX = 5
"""Whoever writes the note anew so often tries the ledger anyway."""
BINDING_MAX_MS = 86_400_000
"""However far ahead a note sets the next try (a clock may be wrong): after a day somebody looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingNote:
    """What was in the way at the last of ``tries``, and when the next one is due.

    Times are the writing node's wall clock, in milliseconds. ``node``: its host, for people.
    ``since_ms``: of the first try that failed for this reason.
    """

    ledger_id: int
    reason: Reason
    detail: str
    node: str
    since_ms: int
    tries: int = 1
    next_try_ms: int = 0
    """0: at any time, as with the notes of the first releases and while a worker holds the lock."""
    grace_until_ms: int = 0
    """When the grace is over that the ledger waits for under a worker's lock; 0: it does not. Binds
    nobody."""
    fingerprint: ClusterFingerprint | None = None
    """As it was when that try began."""
    suspects: frozenset[BookieId] = frozenset()
    """Bookies whose copies were found bad when they were to be copied from: whoever tries it next
    reads them whole."""
    mzxid: int | None = field(default=None, compare=False)
    """Of the znode that it was read from: its last write."""
    written_ms: int | None = field(default=None, compare=False)
    """Likewise, by ZooKeeper's clock."""

    def is_older_than(self, mark_czxid: int) -> bool:
        """Whether it was written before that mark was made, and so of another.

        By its last write: a note that stands is written anew for the next mark. Of a mark it is the
        first: the leader adds bookies to one that stands.
        """
        return self.mzxid is not None and self.mzxid < mark_czxid

    def let_go(self) -> Self:
        """The ledger is to be tried at once, whatever was in the way. What the note tells of bad
        sources stays: who does not know of them takes the ledger for whole by its ends.
        """
        return replace(
            self,
            reason=Reason.LEFT_TO_OTHERS,
            detail=f"to be tried at once: {', '.join(sorted(self.suspects))} are to be read whole",
            tries=1,
            next_try_ms=0,
            fingerprint=None,
        )

    def wait_ms(self, *, now_ms: int, fingerprint: ClusterFingerprint) -> int:
        """How long the ledger is still to be left alone in such a world; 0: not at all."""
        if self.reason.is_of_this_node or self.fingerprint is None:
            return 0
        if fingerprint.warrants_retry(self.fingerprint, self.reason):
            return 0
        wait_ms = min(max(0, self.next_try_ms - now_ms), BINDING_MAX_MS)
        if self.written_ms is not None:  # else each look would find it binding for a day
            wait_ms = min(wait_ms, max(0, self.written_ms + BINDING_MAX_MS - now_ms))
        return wait_ms

    def is_overtaken(self, *, now_ms: int, fingerprint: ClusterFingerprint) -> bool:
        """Whether the world is a better one than it tells of, so that the ledger is tried before
        its time."""
        if self.reason.is_of_this_node or self.fingerprint is None:
            return False
        is_in_grace = self.reason.is_a_grace and now_ms < self.grace_until_ms
        return not is_in_grace and fingerprint.warrants_retry(self.fingerprint, self.reason)

    def tries_for(self, reason: Reason, *, fingerprint: ClusterFingerprint) -> int:
        """How often it failed in a row for this reason, in a world no worse than this one."""
        if self.reason is not reason or self.fingerprint is None:
            return 0
        return 0 if fingerprint.warrants_retry(self.fingerprint, reason) else self.tries

    def to_json(self) -> bytes:
        record = {
            "version": 2,
            "ledger_id": self.ledger_id,
            "reason": self.reason.value,
            "detail": self.detail,
            "node": self.node,
            "since_ms": self.since_ms,
            "tries": self.tries,
            "next_try_ms": self.next_try_ms,
            "grace_until_ms": self.grace_until_ms,
            "world": None if self.fingerprint is None else self.fingerprint.to_record(),
            "suspects": sorted(self.suspects),
        }
        return json.dumps(record).encode()

    @classmethod
    def from_record(cls, ledger_id: int, record: dict[str, Any]) -> Self:
        """Raises CorruptionError on what no release of ours has written, or this one does not
        know."""
        # Version 1 had neither these nor the world, and the first of version 2 no bad sources.
        first = {"tries": 1, "next_try_ms": 0, "grace_until_ms": 0, "suspects": []}
        record = {**first, **record}
        has_world = record.get("world") is not None
        return cls(
            ledger_id=ledger_id,
            reason=_reason(text_field(record, "reason")),
            detail=text_field(record, "detail"),
            node=text_field(record, "node"),
            since_ms=time_field(record, "since_ms"),
            tries=int_field(record, "tries"),
            next_try_ms=time_field(record, "next_try_ms"),
            grace_until_ms=time_field(record, "grace_until_ms"),
            fingerprint=ClusterFingerprint.from_record(object_field(record, "world"))
            if has_world
            else None,
            suspects=frozenset(map(BookieId, texts_field(record, "suspects"))),
        )


def _reason(value: str) -> Reason:
    try:
        return Reason(value)
    except ValueError as error:
        raise CorruptionError("a reason that this release does not know") from error


class WaitingNotes:
    """The notes of all nodes."""

    def __init__(self, store: MetadataStore, paths: ClusterPaths) -> None:
        self._store = store
        self._paths = paths

    async def are_any(self) -> bool:
        """Cheap, where a list of their names may be long."""
        path = self._paths.waiting
        try:
            stat = await self._store.exists(path)
        except UnauthorizedError as error:
            log.warning("record.access_denied", path=path, error=str(error), next_step=ACL_HINT)
            return False
        return stat is not None and stat.child_count > 0

    async def ledger_ids(self) -> set[int]:
        """Ledgers that have a note."""
        names = await children_if_allowed(self._store, self._paths.waiting)
        return {i for i in map(ledger_id_of_name, names) if i is not None}

    async def read(self, ledger_id: int) -> WaitingNote | None:
        """None when there is none, or a later release wrote it in a way that we cannot read, or
        ACLs shut it away."""
        try:
            data, stat = await self._store.get(self._paths.waiting_note(ledger_id))
            note = WaitingNote.from_record(ledger_id, parse_record(data))
        except (NoNodeError, CorruptionError, UnauthorizedError):
            return None
        return replace(note, mzxid=stat.mzxid, written_ms=stat.mtime_ms)

    async def version(self, ledger_id: int) -> int | None:
        """Of its znode; None where there is none."""
        stat = await self._store.exists(self._paths.waiting_note(ledger_id))
        return None if stat is None else stat.version

    async def read_all(self, ledger_ids: Sequence[int]) -> list[WaitingNote]:
        """Those of the ledgers' notes that can be read, in order."""
        notes = await gather_in_parts(self.read, ledger_ids, at_once=READS_AT_ONCE)
        return [note for note in notes if note is not None]

    async def let_go(
        self, ledger_id: int, *, guards: Sequence[Check], beside: WaitingNote | None = None
    ) -> None:
        """Its note binds nobody any more, and goes unless it tells of bad sources, or ``beside``
        does.

        ``guards``: prove that the caller may (rule S3). Raises LockLostError when they do not.
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
        except (CorruptionError, UnauthorizedError):  # it tells nobody anything
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
    """The notes, for a worker: ``batcher``'s guards prove its session (rule S3)."""

    def __init__(self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths) -> None:
        super().__init__(store, paths)
        self._batcher = batcher

    async def write(self, note: WaitingNote, *, is_likely_there: bool = False) -> None:
        """In place of what stands there. ``is_likely_there``: spares a request if that is right."""
        path, data = self._paths.waiting_note(note.ledger_id), note.to_json()
        create, change = (
            Create(path=path, data=data),
            SetData(path=path, data=data, version=ANY_VERSION),
        )
        first, second = (change, create) if is_likely_there else (create, change)
        if not (await self._commit(first) or await self._commit(second)):
            # By others' hands, one right after the other; or somebody deleted the directory.
            await ensure_znode(self._store, self._paths.waiting)
            await self._commit(create)

    async def delete(self, ledger_id: int, *, version: int = ANY_VERSION) -> None:
        """Nothing happens to one that stands at another version."""
        await self._commit(Delete(path=self._paths.waiting_note(ledger_id), version=version))

    async def _commit(self, operation: Create | SetData | Delete) -> bool:
        """False when the note was there, or gone, already, or is another: another node's hand."""
        try:
            await self._batcher.apply(operation)
        except (NodeExistsError, NoNodeError, ConflictError):
            return False
        return True
