"""Records of nodes and commands in ZooKeeper about single ledgers, as versioned JSON.

- ``WaitingNote``, ``<ur>/bookmender/waiting/<ledger id>``: why a marked ledger is not repaired now,
  as a reason and facts, when the next try is due, and why the ledger's end cannot be proven. The
  worker that deferred the ledger writes the note, and all nodes follow it, so that N nodes do not
  try N times. A note without a mark, or older than the mark, blocks nothing: Java's workers delete
  marks and know no notes. A worker reads and writes the note while it holds the ledger's lock; the
  transaction that deletes the lock also writes or deletes the note (``work_queue``). An idle
  worker, or the next one that leases the ledger, deletes an old note.
- ``UnprovenEnd``, a part of the note, is an exception: it stays until the ledger is closed. When
  the remaining entries of such a ledger have their copies, its mark is deleted. Then its end is
  tried again only when one of its bookies disappears or an operator asks. So this part is kept for
  operators.
- ``GivenUpEntries``, ``<ur>/bookmender/given_up/<ledger id>``: the entries that an operator gave up
  when closing a ledger. It is written before CLOSED, and it stays.

``ClusterFingerprint`` is the part of a note that tells when a retry may help before its time: a
bookie registered, or an order changed. That a bookie disappeared seldom helps. Each new
registration has a greater czxid than all earlier ones, so registrations tell the two cases apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.store import Check, MetadataStore, MultiFailed, Operation, Stat
from ledgers.tasks import gather_in_parts
from replication.cluster import ClusterView
from replication.reasons import Blocked, Facts, Reason, Trait, named, traits
from replication.records import (
    Count,
    Record,
    Stored,
    TimeMs,
    children_if_allowed,
    log_denied,
    read_stored,
    update_record,
)
from replication.transactions import guarded_multi
from replication.znodes import ClusterPaths, ledger_id_of_name

READ_MAX = 1_000
"""Ledgers whose metadata is read again at once. For further ones the records are believed."""
READS_AT_ONCE = 500
METADATA_READS_AT_ONCE = 100
BINDING_MAX_MS = 86_400_000
"""A note delays the next try by a day at most, in case the clock of its node was wrong."""


# --- Notes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingNote(Record):
    """Why a ledger was blocked at the last of ``tries``, and when the next try is due.

    Times are wall-clock milliseconds of the node that wrote the note. ``node``: its host, for
    people. ``since_ms``: the first try that failed for this reason.
    """

    ledger_id: Count
    blocked: Blocked
    node: str
    since_ms: TimeMs
    tries: Count = 1
    next_try_ms: TimeMs = 0
    """0: at any time, for example while a worker holds the lock."""
    grace_until_ms: TimeMs = 0
    """End of the grace for which the ledger waits under a worker's lock; 0: none. Other nodes do
    not wait for it."""
    fingerprint: ClusterFingerprint | None = None
    """The cluster when that try began."""
    suspects: frozenset[BookieId] = frozenset()
    """Bookies whose copies were found bad while copying from them. The next try reads them
    completely."""
    unproven: UnprovenEnd | None = None
    """Why the ledger's end could not be proven at the last try. Outlives the mark."""
    mzxid: int | None = field(default=None, compare=False)
    """The last write of the znode that it was read from. Not stored, as the next two fields."""
    written_ms: int | None = field(default=None, compare=False)
    """The same, by ZooKeeper's clock."""
    version: int | None = field(default=None, compare=False)
    """Version of that znode."""

    @property
    def reason(self) -> Reason:
        return self.blocked.reason

    @property
    def is_released(self) -> bool:
        """True if only an unproven end is left of the note: nothing blocks the ledger."""
        is_due = self.reason is Reason.LEFT_TO_OTHERS and self.fingerprint is None
        return is_due and self.unproven is not None and not self.suspects

    def is_older_than(self, mark_czxid: int) -> bool:
        """Return True if the note belongs to an earlier mark.

        The note's last write is compared, because a worker writes an existing note again for the
        next mark; and the mark's creation, because the leader adds bookies to an existing mark.
        """
        return self.mzxid is not None and self.mzxid < mark_czxid

    def let_go(self) -> Self | None:
        """Return what stays of the note when its ledger is due at once, regardless of what blocked
        it. None: nothing.

        ``suspects`` stays: a worker that does not know of them checks only the ends of their
        copies, and would find the ledger whole. ``unproven`` stays, too.
        """
        if not self.suspects and self.unproven is None:
            return None
        lacking = Facts(lacking=named(self.suspects))
        return replace(
            self,
            blocked=Blocked(reason=Reason.LEFT_TO_OTHERS, facts=lacking),
            tries=1,
            next_try_ms=0,
            fingerprint=None,
        )

    def wait_ms(self, *, now_ms: int, fingerprint: ClusterFingerprint) -> int:
        """Return how long the next try must still wait. ``fingerprint``: the cluster now."""
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
        """Return how often it failed in a row for this reason without a change that helps."""
        if self.reason is not reason or self.fingerprint is None:
            return 0
        return 0 if fingerprint.warrants_retry(self.fingerprint, reason) else self.tries

    def merged_into(self, before: WaitingNote | None) -> Self:
        """Return this note with what must not get lost of the one that it replaces."""
        if before is None:
            return self
        unproven = before.unproven if self.unproven is None else self.unproven
        return replace(self, suspects=self.suspects | before.suspects, unproven=unproven)

    def to_json(self) -> bytes:
        stored = replace(self, mzxid=None, written_ms=None, version=None)
        return Record.to_json(stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprovenEnd:
    """An end that is not proven, and why. ``tried_ms``: wall-clock time of the last try."""

    ledger_id: Count
    facts: Facts
    tried_ms: TimeMs

    @property
    def blocked(self) -> Blocked:
        return Blocked(reason=Reason.END_UNPROVEN, facts=self.facts)


@dataclass(slots=True)
class WaitingNotes:
    """Reads and writes the notes of all nodes."""

    _store: MetadataStore
    _paths: ClusterPaths

    async def are_any(self) -> bool:
        """Return True if there is any note. This costs less than listing their names."""
        path = self._paths.waiting
        try:
            stat = await self._store.exists(path)
        except UnauthorizedError:
            log_denied(path)
            return False
        return stat is not None and stat.child_count > 0

    async def ledger_ids(self) -> set[int]:
        """Return the ledgers that have a note."""
        names = await children_if_allowed(self._store, self._paths.waiting)
        return {i for i in map(ledger_id_of_name, names) if i is not None}

    async def read(self, ledger_id: int) -> WaitingNote | None:
        """Return the note; None if it is absent or unreadable. Then the ledger is due."""
        return (await self.read_stored(ledger_id)).value

    async def read_stored(self, ledger_id: int) -> Stored[WaitingNote]:
        path = self._paths.waiting_note(ledger_id)
        stored = await read_stored(self._store, path, WaitingNote.parse)
        note, stat = stored.value, stored.stat
        if note is None or stat is None:
            return stored
        note = replace(
            note,
            ledger_id=ledger_id,
            mzxid=stat.mzxid,
            written_ms=stat.mtime_ms,
            version=stat.version,
        )
        return replace(stored, value=note)

    async def read_all(self, ledger_ids: Sequence[int]) -> list[WaitingNote]:
        """Return the readable notes of these ledgers, in order."""
        notes = await gather_in_parts(self.read, ledger_ids, at_once=READS_AT_ONCE)
        return [note for note in notes if note is not None]

    async def write(
        self,
        note: WaitingNote,
        *,
        before: WaitingNote | None,
        apply: Callable[[Operation], Awaitable[object]],
    ) -> WaitingNote:
        """Write the note in place of ``before``, as far as is known, and return it with its
        version. Raises what ``update_record`` raises."""
        written = note

        def change(stored: WaitingNote | None) -> WaitingNote:
            nonlocal written
            written = note.merged_into(stored)
            return written

        known: Stored[WaitingNote] = Stored()
        if before is not None and before.version is not None:
            known = Stored(value=before, stat=Stat(version=before.version))
        path = self._paths.waiting_note(note.ledger_id)
        version = await update_record(
            self._store, path, WaitingNote.parse, change, apply=apply, known=known
        )
        return replace(written, version=version)

    async def let_go(
        self,
        ledger_id: int,
        *,
        guards: Sequence[Check],
        beside: WaitingNote | None = None,
        is_end_known: bool = False,
    ) -> None:
        """Make the ledger due at once. Delete its note, unless something of it must stay.

        ``beside``: a note to write instead. ``is_end_known``: the ledger was closed, so its end is
        proven. ``guards``: prove that the caller may do this (rule S3). Raises LockLostError if
        they fail.
        """

        def change(note: WaitingNote | None) -> WaitingNote | None:
            if note is not None and is_end_known:
                note = replace(note, unproven=None)
            if beside is not None:
                return beside.merged_into(note)
            return None if note is None else note.let_go()

        await update_record(
            self._store,
            self._paths.waiting_note(ledger_id),
            WaitingNote.parse,
            change,
            apply=partial(_apply_guarded, self._store, guards, ledger_id),
        )


async def _apply_guarded(
    store: MetadataStore, guards: Sequence[Check], ledger_id: int, operation: Operation
) -> None:
    """Apply one operation together with ``guards`` (``guarded_multi``)."""
    try:
        await guarded_multi(store, guards, [operation], ledger_id=ledger_id)
    except MultiFailed as failure:
        raise failure.cause from failure


# --- Ends that cannot be proven -------------------------------------------------------------------


async def read_unproven_end(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int
) -> Stored[UnprovenEnd]:
    """Read the result of the last try, even if the ledger is closed by now."""
    stored = await WaitingNotes(store, paths).read_stored(ledger_id)
    end = stored.value.unproven if stored.value else None
    return Stored(value=end, stat=stored.stat, error=stored.error)


async def read_unproven(
    store: MetadataStore,
    manager: LedgerManager,
    paths: ClusterPaths,
    among: Collection[int] | None = None,
) -> list[UnprovenEnd]:
    """Return the unproven ends of ledgers (of ``among``) that are not closed, in order."""
    notes = WaitingNotes(store, paths)
    noted = await notes.ledger_ids()
    wanted = noted if among is None else noted.intersection(among)
    return await unproven_ends(manager, await notes.read_all(sorted(wanted)))


async def unproven_ends(manager: LedgerManager, notes: Sequence[WaitingNote]) -> list[UnprovenEnd]:
    """Return the unproven ends in these notes, without those of ledgers that are closed now. Only
    the metadata of the first ``READ_MAX`` ledgers is read; the others count as open."""
    ends = [note.unproven for note in notes if note.unproven is not None]
    is_open = set(await still_open(manager, [end.ledger_id for end in ends[:READ_MAX]]))
    return [end for i, end in enumerate(ends) if i >= READ_MAX or end.ledger_id in is_open]


async def still_open(manager: LedgerManager, ledger_ids: Sequence[int]) -> list[int]:
    """Return the ledgers that are not closed. A ledger that cannot be read may be open."""

    async def is_open(ledger_id: int) -> bool:
        try:
            return not (await manager.read(ledger_id)).metadata.is_closed
        except NoSuchLedgerError:
            return False
        except (CorruptionError, UnauthorizedError):
            return True

    are_open = await gather_in_parts(is_open, ledger_ids, at_once=METADATA_READS_AT_ONCE)
    return [i for i, is_so in zip(ledger_ids, are_open, strict=True) if is_so]


# --- Bad copies that a check found ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBad(Record):
    """The part of a finding (``auditor.mark_reasons``) that workers follow."""

    bookies: frozenset[BookieId]


async def read_found_bad(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int
) -> Stored[FoundBad]:
    """Read on which bookies a check or fsck found bad copies of the ledger. A finding may be old.
    It counts only for bookies that the ledger's mark still names."""
    return await read_stored(store, paths.finding(ledger_id), FoundBad.parse)


# --- Entries that were given up -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpEntries(Record):
    """The first and the last entry, both inclusive. ``replies``: what bookies answered for the
    first one. ``by``: the user and host of the command. ``at_ms``: wall-clock time."""

    first_entry_id: Count
    last_entry_id: Count
    replies: str
    by: str
    at_ms: TimeMs


async def read_given_up(
    store: MetadataStore, paths: ClusterPaths, ledger_id: int
) -> Stored[GivenUpEntries]:
    """Read which entries an operator gave up."""
    return await read_stored(store, paths.given_up(ledger_id), GivenUpEntries.parse)


async def record_given_up(
    store: MetadataStore,
    paths: ClusterPaths,
    ledger_id: int,
    entries: GivenUpEntries,
    *,
    guards: Sequence[Check],
) -> None:
    """Write the record over an earlier one. Raises LockLostError and what ZooKeeper raises."""
    await update_record(
        store,
        paths.given_up(ledger_id),
        GivenUpEntries.parse,
        lambda earlier: entries,
        apply=partial(_apply_guarded, store, guards, ledger_id),
    )


# --- When a retry may help ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFingerprint:
    """Bookies and orders at one moment. The two hashes are eight hexadecimal digits each."""

    newest_czxid: Count
    """The greatest czxid of all registrations; 0 if there is none."""
    bookies: str
    """Hash of the registered bookies and the czxids of their registrations."""
    orders: str
    """Hash of the orders that may block a repair, or whose end may help one."""

    @classmethod
    def of(cls, view: ClusterView) -> Self:
        lives, orders = {b: view.czxid(b) for b in view.available}, view.orders
        blocking = [
            sorted((b, o.since_ms, o.may_fence) for b, o in orders.draining.items()),
            sorted((b, w.until_ms) for b, w in orders.maintenance.items()),
            *([] if orders.hold is None or not orders.is_held else [orders.hold.since_ms]),
            *sorted(orders.trusted_cookies.items()),  # then more ends may be provable
        ]
        return cls(
            newest_czxid=max(lives.values(), default=0),
            bookies=_hash(sorted(lives.items())),
            orders=_hash(blocking),
        )

    def warrants_retry(self, then: ClusterFingerprint, reason: Reason | None) -> bool:
        """Return True if a retry may succeed now, after a try at ``then`` failed for ``reason``."""
        return (
            self.newest_czxid > then.newest_czxid
            or self.orders != then.orders
            or (Trait.ANY_CHANGE_HELPS in traits(reason) and self.bookies != then.bookies)
        )


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
