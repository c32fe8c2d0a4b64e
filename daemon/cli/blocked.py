"""Ledgers that a command waits for and that cannot move without an operator.

A worker's note says why its last attempt failed, and may be older than the help. So a command
reports ledgers as blocked only if all remaining ledgers are, for a while, and each was tried again
if a try was due soon. A note from an earlier mark does not count. Java's workers leave no notes.

Also here: the marks of both queues (shared and private), and orders that make nodes retry a ledger
at once.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from auditor.scan import READS_AT_ONCE
from daemon.admin_session import AdminSession
from daemon.status.records import help_text
from daemon.words import duration_text, printable
from ledgers.clock import Clock
from ledgers.errors import ConflictError, CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.model import BookieId
from ledgers.store import Check, MetadataStore
from ledgers.tasks import gather_in_parts
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.marks import (
    MarkedLedger,
    locked_ledger_ids,
    marked_ledger_ids,
    read_locks,
    read_marks,
)
from replication.nodes import Role, live_nodes
from replication.orders import OrderStore, TriesOrder, tries_znode
from replication.reasons import Reason
from replication.znodes import ClusterPaths


async def all_marked(cluster: AdminSession) -> set[int]:
    """Return the IDs of all ledgers marked in either queue."""
    store, paths = cluster.store, cluster.paths
    return {*await marked_ledger_ids(store, paths), *await marked_ledger_ids(store, paths.private)}


async def read_all_marks(cluster: AdminSession, ledger_ids: Collection[int]) -> list[MarkedLedger]:
    """Return the marks of these ledgers from both queues. A ledger in both has two."""
    ordered = sorted(ledger_ids)
    return [
        *await read_marks(cluster.store, cluster.paths, ordered),
        *await read_marks(cluster.store, cluster.paths.private, ordered),
    ]


async def marked_since(cluster: AdminSession, ledger_ids: Collection[int]) -> dict[int, int]:
    """Return the czxid of the mark of each marked ledger, as ``QueuedLedger.czxid`` does."""
    czxids: dict[int, int] = {}
    for marked in await read_all_marks(cluster, ledger_ids):  # the shared ones first
        czxids.setdefault(marked.ledger_id, marked.czxid)
    return czxids


async def current_notes(cluster: AdminSession, notes: Sequence[WaitingNote]) -> list[WaitingNote]:
    """Return the notes that concern the present marks, without graces that are no longer waited
    out.

    A note from an earlier mark says nothing about the present mark. A grace ends with the ledger's
    lock: the next worker that leases the ledger starts a new grace.
    """
    czxids = await marked_since(cluster, [note.ledger_id for note in notes])
    current = [
        note
        for note in notes
        if not (note.is_released or note.is_older_than(czxids.get(note.ledger_id, 0)))
    ]
    in_grace = [note.ledger_id for note in current if note.grace_until_ms]
    locks = {
        lock.ledger_id: lock for lock in await read_locks(cluster.store, cluster.paths, in_grace)
    }
    return [
        note
        if note.ledger_id in locks and not note.is_older_than(locks[note.ledger_id].czxid)
        else replace(note, grace_until_ms=0)
        for note in current
    ]


def access_denied_text(marked: MarkedLedger) -> str:
    """Return what follows from a mark that an ACL denies access to, with ZooKeeper's hint."""
    return f"its mark cannot be read, so no node leases it: {marked.refusal}"


BLOCKED_S = 60.0
"""Time for which all remaining ledgers must need help before they are reported as blocked. When a
bookie comes, nodes retry sooner than that."""
SOON_S = 400.0
"""A next try within this time is waited for: with default settings nodes retry most ledgers within
six minutes. A ledger that is retried less often has failed many times or for a lasting reason, so
its note is believed."""
UNEXPLAINED_S = 120.0
"""Time without any progress after which the command says that no bookmender worker is running to
explain it."""
SHOWN_MAX = 20
WAITS_READ_MAX = 50
"""Number of notes that are read at each poll. Most ledgers wait for the same reason."""
MARKS_READ_AT_ONCE = 50
"""Number of marks of ledgers without a note that are read at once. Usually one of the first ledgers
can move, and then the others need not be read."""


class BlockedLedgers:
    """Remembers, while a command runs, why the remaining ledgers do not move."""

    def __init__(self, cluster: AdminSession, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._notes = WaitingNotes(cluster.store, cluster.paths)
        self._seen_first: dict[int, WaitingNote] = {}
        self._seen_last: list[WaitingNote] = []
        self._since: tuple[float, frozenset[int]] | None = None
        """Time at which all remaining ledgers became blocked, and their IDs."""
        self._still: tuple[float, frozenset[int]] | None = None
        """Time of the last change of the set of remaining ledgers, and their IDs."""
        self._unexplained: frozenset[int] = frozenset()
        """The remaining ledgers when ``unexplained`` last returned a text."""

    async def look(self, ledger_ids: Collection[int]) -> list[str]:
        """Return why each remaining ledger cannot move, once that is certain of all; else empty.

        ``ledger_ids``: all ledgers that the command still waits for.
        """
        now_s, left = self._clock.now_s(), frozenset(ledger_ids)
        told = await self._told(sorted(left))
        if len(told) < len(left):
            self._since = None
        elif self._since is None or self._since[1] != left:  # a ledger moved, so others may move
            self._since = now_s, left
        elif now_s - self._since[0] >= BLOCKED_S:
            if not await self._are_any_old():
                return [told[ledger_id] for ledger_id in sorted(told)]
            self._since = None
        return []

    async def unexplained(self, ledger_ids: Collection[int]) -> str:
        """Return a note if the remaining ledgers do not move and no worker is running to say why.

        Empty if they may still move, or if the note was returned before for the same ledgers.
        """
        now_s, left = self._clock.now_s(), frozenset(ledger_ids)
        if self._still is None or self._still[1] != left:
            self._still = now_s, left
        still_s = now_s - self._still[0]
        if still_s < UNEXPLAINED_S or left == self._unexplained or await self._has_workers():
            return ""
        self._unexplained = left
        return unexplained_text(len(left), still_s=still_s)

    async def _has_workers(self) -> bool:
        """Return True if a bookmender worker runs. It writes a note for each ledger that it cannot
        repair."""
        nodes = await live_nodes(self._cluster.store, self._cluster.paths)
        return any(node.info.role is not Role.AUDITOR for node in nodes)

    async def _told(self, ledger_ids: Sequence[int]) -> dict[int, str]:
        """Return why each ledger is blocked; for only some ledgers, or none, if not all are
        blocked."""
        store, paths = self._cluster.store, self._cluster.paths
        noted = (await self._notes.ledger_ids()).intersection(ledger_ids)
        locked = await locked_ledger_ids(store, paths)
        told = await self._shut([i for i in ledger_ids if i not in noted], locked)
        if len(told) + len(noted) < len(ledger_ids):
            return {}
        now_ms = self._clock.wall_ms()
        self._seen_last = await self._notes.read_all(sorted(noted))
        for note in self._seen_last:
            first = self._seen_first.setdefault(note.ledger_id, note)
            is_at_hand = note.ledger_id in locked
            if waits_for_help(note, first=first, is_at_hand=is_at_hand, now_ms=now_ms):
                told[note.ledger_id] = _help_text(note, is_old=note == first)
        # A note from before ACLs denied access to the mark is outdated.
        told |= await self._shut(sorted(noted.difference(told)), locked)
        # A note without a mark means nothing, and the first audit may not have run yet.
        return told if (await all_marked(self._cluster)).issuperset(ledger_ids) else {}

    async def _are_any_old(self) -> bool:
        """Return True if a note concerns an earlier mark. Then no node has tried the present mark
        yet."""
        czxids = await marked_since(self._cluster, [note.ledger_id for note in self._seen_last])
        return any(note.is_older_than(czxids.get(note.ledger_id, 0)) for note in self._seen_last)

    async def _shut(self, ledger_ids: Sequence[int], locked: Collection[int]) -> dict[int, str]:
        """Return the reason of each ledger whose mark cannot be read because ACLs deny access.

        Stops after the first batch with a readable mark. The mark of a locked ledger counts as
        readable, because some node could read it.
        """
        told: dict[int, str] = {}
        for start in range(0, len(ledger_ids), MARKS_READ_AT_ONCE):
            part = ledger_ids[start : start + MARKS_READ_AT_ONCE]
            marks = await read_all_marks(self._cluster, part)
            leasable = {marked.ledger_id for marked in marks if not marked.refusal}.union(locked)
            told |= {
                m.ledger_id: _access_denied_text(m) for m in marks if m.ledger_id not in leasable
            }
            if len(told) < start + len(part):
                break
        return told


def unexplained_text(count: int, *, still_s: float) -> str:
    """Return a note that nothing moves and no node says why."""
    what = (
        "The last ledger has not moved"
        if count == 1
        else f"None of the {count:,} remaining ledgers has moved"
    )
    return (
        f"{what} for {duration_text(still_s)}. No bookmender worker is running that could report "
        "why (Java's workers do not). bookmender plan LEDGER shows what blocks a ledger."
    )


def first_reasons(reasons: Sequence[str]) -> list[str]:
    """Return the first ``SHOWN_MAX`` reasons. If there are more, add a line with their number."""
    more = len(reasons) - SHOWN_MAX
    rest = [f"and {more:,} more. bookmender queue list shows all."] if more > 0 else []
    return [*reasons[:SHOWN_MAX], *rest]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCounts:
    """Number of ledgers that wait, and the reasons of some of them.

    ``count``: ledgers with a note. ``looked_at``: how many of these notes were read. Of these,
    ``for_windows`` wait for a maintenance window to end, and the first of them is tried again at
    ``next_try_ms`` (wall clock); ``for_writers`` wait for their writers to close them.
    """

    count: int
    looked_at: int = 0
    for_windows: int = 0
    next_try_ms: int = 0
    for_writers: int = 0


NO_WAITS = WaitingCounts(count=0)


async def still_naming(
    cluster: AdminSession, ledger_ids: Sequence[int], bookies: Collection[BookieId]
) -> list[int]:
    """Return the ledgers that still name any of these bookies, or may. A deleted ledger does not.

    A mark for a bookie may remain after the ledger has left the bookie: copies may be missing on
    another bookie that is in maintenance.
    """

    async def names(ledger_id: int) -> bool:
        try:
            metadata = (await cluster.manager.read(ledger_id)).metadata
        except NoSuchLedgerError:
            return False
        except (CorruptionError, UnauthorizedError):
            return True
        return not metadata.bookies.isdisjoint(bookies)

    are_left = await gather_in_parts(names, ledger_ids, at_once=READS_AT_ONCE)
    return [i for i, is_left in zip(ledger_ids, are_left, strict=True) if is_left]


async def count_waiting(cluster: AdminSession, ledger_ids: Collection[int]) -> WaitingCounts:
    """Count the waiting ledgers among these, and read the notes of the first ones."""
    notes = WaitingNotes(cluster.store, cluster.paths)
    noted = sorted((await notes.ledger_ids()).intersection(ledger_ids))
    looked_at = await notes.read_all(noted[:WAITS_READ_MAX])
    for_windows = [note for note in looked_at if note.reason is Reason.MAINTENANCE]
    return WaitingCounts(
        count=len(noted),
        looked_at=len(looked_at),
        for_windows=len(for_windows),
        for_writers=sum(note.reason is Reason.OPEN_FRAGMENT for note in looked_at),
        next_try_ms=min((note.next_try_ms for note in for_windows), default=0),
    )


def waiting_text(waits: WaitingCounts, *, left: int, now_ms: int) -> str:
    """Return how many of the ``left`` ledgers wait and for what; empty if none does.

    A maintenance window may last for days. So the text does not promise that the wait ends soon.
    """
    if not waits.count:
        return ""
    told = f"{waits.count:,} of them {'waits' if waits.count == 1 else 'wait'}"
    details = "bookmender queue list shows the reasons"
    if waits.for_windows:
        some = "" if waits.for_windows == waits.looked_at else ", some of them"
        told += f"{some} for a maintenance window to end"
        if (left_ms := waits.next_try_ms - now_ms) > 0:
            told += f" (next try in {duration_text(left_ms / 1000)}, or when its bookie is back)"
        return f"{told}; {details}"
    if waits.for_writers:
        some = "" if waits.for_writers == waits.looked_at else ", some of them"
        told += f"{some} until their writers close them (a drain with --fence-open does not wait)"
        return f"{told}; {details}"
    told += f"; {details}"
    return (
        told
        if waits.count < left
        else f"{told}; if all stay blocked, this command ends in a minute"
    )


def waits_for_help(note: WaitingNote, *, first: WaitingNote, is_at_hand: bool, now_ms: int) -> bool:
    """Return True if the next try of this ledger cannot succeed either.

    ``first``: the first note that this command saw of the ledger. What it reports may be over: the
    disk has space again, or the ACL was opened. A try that is due is awaited only while it is in
    progress (``is_at_hand``); otherwise no node is there to make it.
    """
    if not note.reason.needs_help:
        return False
    if _without_times(note) != _without_times(first) or note.reason.ends_with_a_bookie:
        return True
    left_ms = note.next_try_ms - now_ms
    return left_ms > SOON_S * 1000 or (left_ms <= 0 and not is_at_hand)


def _without_times(note: WaitingNote) -> WaitingNote:
    """Return the note without its times, to see whether a failed try changed anything else."""
    return replace(note, next_try_ms=0, grace_until_ms=0)


def _help_text(note: WaitingNote, *, is_old: bool) -> str:
    """Return the text for a blocked ledger. ``is_old``: no node has tried it since the command
    started."""
    text = help_text(note)
    if is_old and not note.reason.ends_with_a_bookie:
        text += f". When this is resolved, try now: bookmender repair {note.ledger_id}"
    return text


def _access_denied_text(marked: MarkedLedger) -> str:
    return printable(f"ledger {marked.ledger_id} is blocked: {access_denied_text(marked)}")


GIVES_MAX = 10
"""Number of attempts to write the order. Others may write it at the same moment; after so many
conflicts the ledger waits for its next regular try."""


async def try_now(
    ledger_id: int,
    store: MetadataStore,
    paths: ClusterPaths,
    *,
    guards: Sequence[Check],
    clock: Clock,
) -> None:
    """Order an immediate retry of a ledger that was closed. Does nothing if it is not marked.

    ``guards``: prove that the caller holds the ledger's lock (rule S3). Raises LockLostError if it
    does not.
    """
    if not await _is_marked(ledger_id, store, paths):
        return
    await WaitingNotes(store, paths).let_go(ledger_id, guards=guards, is_end_known=True)
    await order_retries([ledger_id], store, paths, clock)


async def _is_marked(ledger_id: int, store: MetadataStore, paths: ClusterPaths) -> bool:
    return any([await read_marks(store, queue, [ledger_id]) for queue in (paths, paths.private)])


async def order_retries(
    ledger_ids: Iterable[int], store: MetadataStore, paths: ClusterPaths, clock: Clock
) -> None:
    """Order all nodes to forget the notes of these ledgers and to try them now."""
    ledger_ids = list(ledger_ids)
    order_store, znode = OrderStore(store, paths), tries_znode(paths)
    for _ in range(GIVES_MAX):
        stored = await order_store.stored(znode)
        before = TriesOrder() if stored is None or stored.value is None else stored.value
        order = before
        for ledger_id in ledger_ids:
            order = order.with_ledger(ledger_id, now_ms=clock.wall_ms())
        with suppress(ConflictError):
            await order_store.give(znode, order, over=stored)
            return
