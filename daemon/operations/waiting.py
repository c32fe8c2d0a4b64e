"""Waiting for ledgers, the marks of both queues, and orders to try ledgers at once.

``Waiter`` is for commands that wait until ledgers have moved. It shows how many are left and why,
and finds out when none of them can move without an operator. A worker's note says why its last try
failed, and may be older than the help. So a command gives up only if all remaining ledgers need
help, and no next try is near. Java's workers leave no notes.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

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
from replication.nodes import LiveNode
from replication.orders import OrderStore, TriesOrder, tries_znode
from replication.reasons import Reason
from replication.znodes import ClusterPaths

POLL_S = 1.0
POLLED_LEDGERS_PER_S = 500
"""Number of remaining ledgers that add one second to the time between two polls."""
ROLL_CALL_S = 10.0
"""Time between two checks of whether nodes are at work."""
BLOCKED_S = 60.0
"""Time for which all remaining ledgers must need help before they are reported as blocked. When a
bookie comes, nodes retry sooner than that."""
SOON_S = 400.0
"""The same time if a next try may succeed before: with default settings nodes retry most ledgers
within six minutes. A ledger that is retried less often has failed many times or for a lasting
reason, so its note is believed at once."""
SHOWN_MAX = 20
NOTES_READ_AT_ONCE = 50
"""Number of ledgers whose notes are read at once. Usually one of the first ledgers can move, and
then the others need not be read."""


class Show(Protocol):
    """A callback that receives how much is left. ``waiting``: how many of these wait for something.
    ``beside``: another fact for the reader; may be empty."""

    def __call__(self, left: int, *, waiting: int = 0, beside: str = "") -> None: ...


class Waiter:
    """Shows progress while a command waits for ledgers, and says when none of them can move."""

    def __init__(
        self,
        cluster: AdminSession,
        *,
        concerns: Callable[[dict[str, LiveNode | None]], Awaitable[list[str]]],
        notify: Callable[[str], None],
        show: Show,
        clock: Clock,
    ) -> None:
        """``concerns``: returns what keeps the nodes from the work; its argument is a cache.
        ``notify``: receives these concerns, at the start and after each change."""
        self._cluster, self._concerns = cluster, concerns
        self._notify, self._show, self._clock = notify, show, clock
        self._notes = WaitingNotes(cluster.store, cluster.paths)
        self._nodes: dict[str, LiveNode | None] = {}
        self._roll_call_s = -math.inf
        self._told: list[str] = []
        self._since: tuple[float, frozenset[int]] | None = None
        """Time since when all remaining ledgers need help, and their IDs."""

    async def call_roll(self) -> None:
        """Report changes of the concerns, at most once per ``ROLL_CALL_S``."""
        if self._clock.now_s() < self._roll_call_s:
            return
        self._roll_call_s = self._clock.now_s() + ROLL_CALL_S
        found = await self._concerns(self._nodes)
        if found != self._told:
            for text in found or ["Nodes are at work now."]:
                self._notify(text)
        self._told = found

    async def poll(self, ledger_ids: Collection[int], *, left: int | None = None) -> list[str]:
        """Show how much is left, and wait for the next poll.

        ``left``: the number to show, if it is not that of ``ledger_ids``. Returns why each of these
        ledgers cannot move, without waiting, once that is so for all of them; else empty.
        """
        await self.call_roll()
        noted = (await self._notes.ledger_ids()).intersection(ledger_ids)
        some = await self._notes.read_all(sorted(noted)[:NOTES_READ_AT_ONCE])
        if reasons := await self._blocked(sorted(ledger_ids), noted, some):
            return reasons
        count = len(ledger_ids) if left is None else left
        beside = waiting_text(len(noted), some, left=count, now_ms=self._clock.wall_ms())
        self._show(count, waiting=len(noted), beside=beside)
        await self._clock.sleep(POLL_S + len(ledger_ids) / POLLED_LEDGERS_PER_S)
        return []

    async def _blocked(
        self, left: Sequence[int], noted: Collection[int], some: Sequence[WaitingNote]
    ) -> list[str]:
        """Return why each ledger cannot move, once all of them needed help for long; else empty."""
        told = await self._needing_help(left, noted)
        if not left or len(told) < len(left):
            self._since = None
            return []
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        if self._since is None or self._since[1] != frozenset(left):
            self._since = now_s, frozenset(left)  # a ledger moved, so others may move
        is_a_try_near = any(
            not note.reason.ends_with_a_bookie and note.next_try_ms - now_ms <= SOON_S * 1000
            for note in some
        )
        if now_s - self._since[0] < (SOON_S if is_a_try_near else BLOCKED_S):
            return []
        # No node has tried the present mark yet if a note is older.
        notes = await self._notes.read_all(sorted(noted))
        czxids = await marked_since(self._cluster, [note.ledger_id for note in notes])
        if any(note.is_older_than(czxids.get(note.ledger_id, 0)) for note in notes):
            self._since = None
            return []
        return [told[ledger_id] for ledger_id in left]

    async def _needing_help(self, left: Sequence[int], noted: Collection[int]) -> dict[int, str]:
        """Return why each ledger needs help; for fewer ledgers if one of them may move.

        A ledger without a mark may move: its note means nothing, and the first audit may not have
        run yet. The mark of a locked ledger counts as readable, because some node could read it.
        """
        if not (await all_marked(self._cluster)).issuperset(left):
            return {}
        locked = await locked_ledger_ids(self._cluster.store, self._cluster.paths)
        told: dict[int, str] = {}
        for start in range(0, len(left), NOTES_READ_AT_ONCE):
            part = left[start : start + NOTES_READ_AT_ONCE]
            for note in await self._notes.read_all([i for i in part if i in noted]):
                if note.reason.needs_help:
                    told[note.ledger_id] = help_text(note)
                    if not note.reason.ends_with_a_bookie:
                        told[note.ledger_id] += (
                            f". When this is resolved, try now: bookmender repair {note.ledger_id}"
                        )
            others = [i for i in part if i not in told]
            marks = await read_all_marks(self._cluster, others)
            leasable = {marked.ledger_id for marked in marks if not marked.refusal}.union(locked)
            told |= {
                m.ledger_id: printable(f"ledger {m.ledger_id} is blocked: {access_denied_text(m)}")
                for m in marks
                if m.ledger_id not in leasable
            }
            if len(told) < start + len(part):
                break
        return told


def waiting_text(count: int, some: Sequence[WaitingNote], *, left: int, now_ms: int) -> str:
    """Return how many of the ``left`` ledgers wait and for what; empty if none does.

    ``some``: notes of the first of them. A maintenance window may last for days. So the text does
    not promise that the wait ends soon.
    """
    if not count:
        return ""
    told = f"{count:,} of them {'waits' if count == 1 else 'wait'}"
    details = "bookmender queue shows the reasons"
    for_windows = [note for note in some if note.reason is Reason.MAINTENANCE]
    for_writers = [note for note in some if note.reason is Reason.OPEN_FRAGMENT]
    if for_windows:
        told += ", some of them" if len(for_windows) < len(some) else ""
        told += " for a maintenance window to end"
        if (left_ms := min(note.next_try_ms for note in for_windows) - now_ms) > 0:
            told += f" (next try in {duration_text(left_ms / 1000)}, or when its bookie is back)"
    elif for_writers:
        told += ", some of them" if len(for_writers) < len(some) else ""
        its = f"its writer closes it: ledger {for_writers[0].ledger_id}"
        open_for = its if count == 1 else "their writers close them"
        told += f" until {open_for}, perhaps for days (a drain with --fence-open does not wait)"
    elif count >= left:
        # The reader need not wait for the end of the command to learn what may keep all of them.
        why = next((f" ({help_text(note)})" for note in some if note.reason.needs_help), "")
        return f"{told}{why}; {details}; if all stay blocked, this command ends in some minutes"
    return f"{told}; {details}"


def first_reasons(reasons: Sequence[str]) -> list[str]:
    """Return the first ``SHOWN_MAX`` reasons. If there are more, add a line with their number."""
    more = len(reasons) - SHOWN_MAX
    rest = [f"and {more:,} more. bookmender queue shows all."] if more > 0 else []
    return [*reasons[:SHOWN_MAX], *rest]


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


# --- Marks and notes ------------------------------------------------------------------------------


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


# --- Orders to try ledgers at once ----------------------------------------------------------------

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
    if not any([await read_marks(store, queue, [ledger_id]) for queue in (paths, paths.private)]):
        return
    await WaitingNotes(store, paths).let_go(ledger_id, guards=guards, is_end_known=True)
    await order_retries([ledger_id], store, paths, clock)


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
