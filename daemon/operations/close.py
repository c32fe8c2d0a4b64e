"""Closes an open ledger by hand: checks whether a writer may be alive, then recovers the ledger.

It cannot be proven that a writer has stopped; the best evidence is a long time without entries.
Closing locks the writer out for good, so an operator must confirm it if the writer may be alive. If
too few bookies answer to find the end (rule S5), or no bookie can store the last entries, nothing
is fenced.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

from msgspec import structs

from auditor.checks.idle import LastChange, read_last_changes, updated_change
from daemon.admin_session import (
    AdminSession,
    admin_session,
    operator,
    order_event,
    writing_session,
)
from daemon.answers import Answer
from daemon.messages import CANNOT_CLOSE, end_doubt_text, message
from daemon.operations.plan import open_inspection
from daemon.operations.waiting import try_now
from daemon.settings import Settings
from daemon.words import duration_text, printable
from ledgers.bookies import Bookies
from ledgers.clock import Clock, SystemClock
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    DamagedEndError,
    JournalError,
    LockLostError,
    NotEnoughBookiesError,
    RejectedError,
    SessionLostError,
    UnavailableError,
    UnprovenEndError,
)
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, LedgerState
from ledgers.quorum import RecoveredEnd
from ledgers.reading import NO_ENTRY, LastEntry, last_entry_of, ledger_digest
from ledgers.recovery import NO_ACK_QUORUM
from ledgers.store import Check, MetadataStore
from replication.by_hand import LockedError, Tell, locked
from replication.cluster import ClusterView, ViewSource
from replication.history import NO_HISTORY, Event, History, Kind
from replication.inspection import first_damaged, inspect_tail
from replication.ledger_record import GivenUpEntries, read_found_bad, record_given_up
from replication.marks import private_mark_operations, read_marks
from replication.open_ledgers import OpenLedgers, end_doubts, held_back, wanted_for_coverage
from replication.reasons import Blocked, Facts, Reason
from replication.recent_copies import record_by_hand
from replication.znodes import ClusterPaths

DAMAGE_ENTRIES_MAX = 10_000
"""Number of entries after the LAC that are read before a ledger is closed. A writer has fewer under
way."""

LastEntries = Mapping[BookieId, LastEntry | None]
"""The last entry that each member of a last ensemble reports. None: the bookie does not answer."""


class CloseRefusedError(RejectedError):
    """A writer may still write the ledger, or it cannot be closed now. The message says why."""


class LedgerClosing(Answer, frozen=True, kw_only=True):
    """A ledger after an attempt to close it, or what would prevent the attempt."""

    ledger_id: int
    state_before: str
    state: str
    last_entry_id: int | None = None
    """Of an open ledger, the highest that its bookies report. -1: no entry; null: no answer."""
    length: int | None = None
    doubts: tuple[str, ...] = ()
    """Why a writer may still write the ledger. --force closes it nevertheless."""
    held_back: str = ""
    """Why no ledger may be fenced now, whether a writer is alive or not."""
    cannot_close: str = ""
    """Why its end cannot be found or its last entries cannot be written now, and what helps."""
    end_doubt: str | None = None
    """Why its end may not be provable."""
    would_give_up: str | None = None
    """The entries that --accept-loss would give up: only damaged copies of the first one exist."""
    has_changed: bool = False

    @classmethod
    def of(
        cls, found: VersionedMetadata, closed: VersionedMetadata | None = None
    ) -> "LedgerClosing":
        metadata = (found if closed is None else closed).metadata
        return cls(
            ledger_id=found.ledger_id,
            state_before=found.metadata.state.name,
            state=metadata.state.name,
            last_entry_id=metadata.last_entry_id if metadata.is_closed else None,
            length=metadata.length if metadata.is_closed else None,
            has_changed=closed is not None,
        )

    @property
    def is_closed(self) -> bool:
        return self.state == LedgerState.CLOSED.name

    def refusal(self, *, is_forced: bool) -> str:
        """Return why the ledger must not be closed; empty if it may be closed."""
        if refusal := ". Also, ".join(filter(None, [self.held_back, self.cannot_close])):
            return refusal
        if self.doubts and not is_forced:
            return (
                f"its writer may be running: {'; '.join(self.doubts)}. Closing fences the ledger, "
                "so a running writer could never write to it again"
            )
        return ""


async def look_before_closing(settings: Settings, ledger_id: int, *, tell: Tell) -> LedgerClosing:
    """Inspect the ledger without writing. Raises the errors of ``LedgerCloser.look``."""
    async with (
        admin_session(settings) as cluster,
        _open_closer(cluster, cluster.manager, tell=tell) as closer,
    ):
        return await closer.look(ledger_id)


async def close_ledger(
    settings: Settings, ledger_id: int, *, is_forced: bool, accepts_loss: bool, tell: Tell
) -> LedgerClosing:
    """Close the ledger in a session of its own.

    Raises the errors of ``LedgerCloser.close``, and SettingsError if nothing can be recorded.
    """
    did = CollectedEvents()
    async with (
        writing_session(settings) as ours,
        _open_closer(ours.cluster, ours.manager, tell=tell, history=did) as closer,
    ):
        event = order_event("ledger close --accept-loss" if accepts_loss else "ledger close")
        try:
            done = await closer.close(
                ledger_id,
                session=ours.session,
                holder=ours.holder,
                is_forced=is_forced,
                accepts_loss=accepts_loss,
            )
        except BookmenderError as error:
            if did.events or isinstance(error, UnavailableError):  # its writer may be fenced
                event = structs.replace(event, reason=str(error))
                await ours.cluster.note_order(event, [ledger_id], effects=did.events)
            raise
        if done.has_changed:
            event = structs.replace(event, last_entry_id=done.last_entry_id)
            await ours.cluster.note_order(event, [ledger_id], effects=did.events)
        return done


class CollectedEvents(History):
    """The fence and the recovery of a command, which records them together with its order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        if event.kind != Kind.RECOVERY_UNFINISHED:  # the order tells it
            self.events.append(event)


@asynccontextmanager
async def _open_closer(
    cluster: AdminSession, manager: LedgerManager, *, tell: Tell, history: History = NO_HISTORY
) -> AsyncIterator["LedgerCloser"]:
    """Yield a closer with what recovers ledgers in a worker. The placement policy chooses
    replacements for bookies that fail."""
    async with open_inspection(cluster) as inspection:
        open_ledgers = OpenLedgers(
            manager=manager,
            bookies=inspection.bookies,
            views=inspection.views,
            fallback_digest=cluster.settings.replication.fallback_digest,
            target_selector=await inspection.target_selector(cluster),
            clock=SystemClock(),
            history=history,
        )
        yield LedgerCloser(
            store=cluster.store,
            manager=manager,
            bookies=inspection.bookies,
            views=inspection.views,
            open_ledgers=open_ledgers,
            paths=cluster.paths,
            after_s=cluster.settings.checks.counts_as_idle_after_s,
            clock=SystemClock(),
            tell=tell,
        )


# --- Reasons not to close -------------------------------------------------------------------------


def doubts_about(
    sighting: LastChange | None,
    *,
    last_entry_id: int | None,
    written_ms: int,
    now_ms: int,
    after_s: float,
) -> tuple[str, ...]:
    """Return why a writer may still write an open ledger.

    ``sighting``: what the last check recorded of the ledger.
    """
    if last_entry_id is None:
        return ("none of its bookies reports a last entry",)
    if sighting is None:
        return ("no check has seen it idle, so the time of its last entry is unknown",)
    now = updated_change(
        sighting, last_entry_id=last_entry_id, written_ms=written_ms, now_ms=now_ms
    )
    if now != sighting:
        return ("since the last check it got an entry, or its ensemble changed",)
    idle_s = sighting.idle_s(now_ms)
    if idle_s < after_s:
        return (f"it has been idle for only {duration_text(idle_s)}, as far as checks know",)
    return ()


def silent_of(told: LastEntries, view: ClusterView) -> frozenset[BookieId]:
    """Return the bookies that do not answer.

    An answer from the address of a bookie that is not registered is not that bookie's answer.
    """
    return frozenset(b for b, last in told.items() if last is None or b not in view.answering)


def _whereabouts(bookie: BookieId, view: ClusterView) -> str:
    if bookie in view.available:
        is_superseded = bookie not in view.answering
        return (
            "another bookie is registered at its address"
            if is_superseded
            else "registered, but unresponsive"
        )
    return "not registered" if bookie in view.cookies else "decommissioned: it has no cookie"


def whom_to_start(metadata: LedgerMetadata, silent: AbstractSet[BookieId]) -> str:
    """Return which of the bookies that do not answer are needed to find the ledger's end.

    ``silent``: these bookies. Call this only if they are too many.
    """
    everybody = frozenset(metadata.last_segment.ensemble)
    alone = [b for b in silent if not wanted_for_coverage(metadata, everybody - silent | {b})]
    needed = [b for b in silent if wanted_for_coverage(metadata, everybody - {b})]
    if alone:
        which = " or ".join(sorted(alone))
    elif len(needed) == len(silent):
        which = " and ".join(sorted(silent))
    else:
        which = f"enough of {', '.join(sorted(silent))}"
    return f"Start {which} (even without their data), then run this command again"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCloser:
    """Inspects and closes open ledgers for one command.

    ``after_s``: a ledger without a new entry for this long counts as idle. ``tell``: receives notes
    about a lock that the command waits for.
    """

    store: MetadataStore
    manager: LedgerManager
    bookies: Bookies
    views: ViewSource
    open_ledgers: OpenLedgers
    paths: ClusterPaths
    after_s: float
    clock: Clock
    tell: Tell

    async def look(self, ledger_id: int) -> LedgerClosing:
        """Inspect the ledger without writing or fencing. Raises NoSuchLedgerError,
        CorruptionError."""
        return (await self._inspect(ledger_id))[1]

    async def _inspect(self, ledger_id: int) -> tuple[VersionedMetadata, LedgerClosing]:
        await self.manager.sync(ledger_id)
        found = await self.manager.read(ledger_id)
        # A hold may have begun while the command waited for the lock.
        view = await self.views.refresh()
        if found.metadata.is_closed:
            return found, LedgerClosing.of(found)
        told = await self._last_entries(found)
        last_entry_id = max((r.last_entry_id for r in told.values() if r is not None), default=None)
        doubts: tuple[str, ...] = ()
        if found.metadata.state is LedgerState.OPEN:  # in recovery the writer is locked out already
            idle = await read_last_changes(self.store, self.paths)
            doubts = doubts_about(
                idle.value.by_ledger().get(ledger_id) if idle.value else None,
                last_entry_id=last_entry_id,
                written_ms=found.stat.mtime_ms,
                now_ms=self.clock.wall_ms(),
                after_s=self.after_s,
            )
        hold, end = held_back(view.orders), end_doubts(found, view)
        return found, structs.replace(
            LedgerClosing.of(found),
            last_entry_id=last_entry_id,
            doubts=doubts,
            held_back="" if hold is None else printable(message(ledger_id, hold).text),
            cannot_close=await self._why_unclosable(found, told),
            end_doubt=end_doubt_text(end) if end else None,
            would_give_up=await self._damage(found, told) or None,
        )

    async def _why_unclosable(self, found: VersionedMetadata, told: LastEntries) -> str:
        """Return why the end cannot be found or the last entries cannot be written, and what helps;
        empty if both can."""
        metadata, view = found.metadata, self.views.current
        if metadata.ack_quorum < 1:
            return f"it cannot be closed, even with --force: {NO_ACK_QUORUM}. {CANNOT_CLOSE}"
        silent = silent_of(told, view)
        named = ", ".join(f"{bookie} ({_whereabouts(bookie, view)})" for bookie in sorted(silent))
        no_answer = f"it cannot be closed now, even with --force: no answer from {named}"
        if wanted_for_coverage(metadata, told.keys() - silent):
            return (
                f"{no_answer}. Its end cannot be found without more of these bookies. "
                f"{whom_to_start(metadata, silent)}"
            )
        answers = {b: None if b in silent else last for b, last in told.items()}
        if await self.open_ledgers.can_write_back(metadata, answers):
            return ""
        no_target = self.open_ledgers.no_target(found, silent=silent)
        why = message(found.ledger_id, no_target).text
        return f"{no_answer}. Also, {why}. Then run this command again"

    async def _damage(self, found: VersionedMetadata, told: LastEntries) -> str:
        """Return which entries after the LAC are damaged; empty if none are.

        Reads the entries from every registered member of the last ensemble, without fencing.
        """
        last_entries = [each for each in told.values() if each is not None]
        first = max(
            [found.metadata.last_segment.first_entry_id, *(e.lac + 1 for e in last_entries)]
        )
        last = max((each.last_entry_id for each in last_entries), default=NO_ENTRY)
        # A damaged LAC may be any number, so the range is limited.
        last = min(last, first + DAMAGE_ENTRIES_MAX)
        if last < first:
            return ""
        findings = await inspect_tail(
            found,
            bookies=self.open_ledgers.bookies,
            digest=ledger_digest(found.metadata, self.open_ledgers.fallback_digest),
            asked=self.views.current.answering,
            first_entry_id=first,
            last_entry_id=last,
        )
        damaged = first_damaged(findings, first_entry_id=first, last_entry_id=last)
        if damaged is None:
            return ""
        where = ", ".join(sorted(f.bookie for f in findings if damaged in f.damaged))
        return (
            f"entries {damaged} to {last}: no bookie returns a good copy of entry {damaged}, and "
            f"its copies on {where} are damaged"
        )

    async def _last_entries(self, found: VersionedMetadata) -> LastEntries:
        """Ask all members of the last ensemble for their last entry.

        A bookie that is not registered is asked as well: it may run and have lost only its session.
        """
        members = found.metadata.last_segment.ensemble
        told = await asyncio.gather(
            *(last_entry_of(self.bookies, bookie, found.ledger_id) for bookie in members)
        )
        return dict(zip(members, told, strict=True))

    async def close(
        self,
        ledger_id: int,
        *,
        session: Check,
        holder: str,
        is_forced: bool = False,
        accepts_loss: bool = False,
    ) -> LedgerClosing:
        """Recover the ledger, close it, and mark it in the private queue so that nodes check its
        copies.

        A ledger that is already closed stays as it is. ``session``: proves that the ZooKeeper
        session is still ours (rule S3). ``is_forced``: close despite doubts. A safety hold, an end
        that cannot be found, or last entries that no bookie can store still prevent it.
        ``accepts_loss``: see ``OpenLedgers.recover``.

        Raises CloseRefusedError; LockedError if the ledger stays locked by another node or command;
        and the errors of ``recover_ledger``, with what was done until then.
        """

        async def inspect() -> tuple[VersionedMetadata, LedgerClosing]:
            found, before = await self._inspect(ledger_id)
            if refused := before.refusal(is_forced=is_forced):
                raise CloseRefusedError(refused, ledger_id=ledger_id)
            return found, before

        # Before the lock, so that a closed ledger or a refusal does not wait for it.
        _, before = await inspect()
        if before.is_closed:
            return before
        try:
            async with locked(
                ledger_id,
                self.store,
                self.paths,
                session,
                holder,
                clock=self.clock,
                tell=self.tell,
            ) as lock:
                found, before = await inspect()
                if before.is_closed:
                    return before
                guards = [session, lock]
                closed = await self._recover(found, accepts_loss=accepts_loss, guards=guards)
                # The ledger is closed. If this order fails, a node tries the ledger later.
                with suppress(UnavailableError, SessionLostError, LockLostError, RejectedError):
                    await try_now(
                        ledger_id, self.store, self.paths, guards=guards, clock=self.clock
                    )
                done = LedgerClosing.of(found, closed)
                return structs.replace(done, doubts=before.doubts)
        except LockedError:
            found = await self.manager.read(ledger_id)
            if not found.metadata.is_closed:
                raise
            # the holder of the lock closed it and checks its copies
            return LedgerClosing.of(found)

    async def _recover(
        self, found: VersionedMetadata, *, accepts_loss: bool, guards: Sequence[Check]
    ) -> VersionedMetadata:
        async def before_close(end: RecoveredEnd) -> None:
            if end.new_members:
                await record_by_hand(
                    self.store,
                    self.paths,
                    ledger_id=found.ledger_id,
                    targets=end.new_members,
                    session=guards[0],
                    guards=guards,
                )
            if end.given_up is not None:
                entries = GivenUpEntries(
                    first_entry_id=end.given_up.first_entry_id,
                    last_entry_id=end.given_up.last_entry_id,
                    replies=end.given_up.replies,
                    by=operator(),
                    at_ms=self.clock.wall_ms(),
                )
                await record_given_up(
                    self.store, self.paths, found.ledger_id, entries, guards=guards
                )

        try:
            return await self.open_ledgers.recover(
                found,
                self.views.current,
                suspects=() if accepts_loss else await self._found_bad(found.ledger_id),
                accepts_loss=accepts_loss,
                guards=guards,
                before_close=before_close,
                # The last entries may have fewer copies than the write quorum: nodes check them.
                beside=partial(
                    private_mark_operations, self.store, self.paths, found.ledger_id, self.clock
                ),
            )
        except ConflictError as error:
            raise CloseRefusedError(
                "its metadata changed during the inspection, so its writer may be running. Run "
                "this command again to inspect the ledger once more"
            ) from error
        except UnprovenEndError as error:
            blocked = await self.open_ledgers.end_unproven(found, self.views.current, error)
            raise await self._refused(found, blocked) from error
        except DamagedEndError as error:
            blocked = Blocked(reason=Reason.END_DAMAGED, facts=Facts(errors=(str(error),)))
            raise await self._refused(found, blocked) from error
        except NotEnoughBookiesError as error:
            raise await self._refused(found, self.open_ledgers.no_target(found, error)) from error
        except JournalError:
            raise
        except UnavailableError as error:
            told = await self._last_entries(found)
            silent = silent_of(told, self.views.current)
            hint = (
                whom_to_start(found.metadata, silent)
                if wanted_for_coverage(found.metadata, told.keys() - silent)
                else "Its bookies answer now: run this command again"
            )
            raise UnavailableError(f"{error}. {await self._so_far(found)}{hint}") from error

    async def _refused(self, found: VersionedMetadata, blocked: Blocked) -> CloseRefusedError:
        told = message(found.ledger_id, blocked)
        return CloseRefusedError(
            f"{told.what}. {await self._so_far(found)}{told.advice}".rstrip().removesuffix(".")
        )

    async def _found_bad(self, ledger_id: int) -> frozenset[BookieId]:
        """Return the marked bookies for which a check or fsck found that entries of the ledger are
        lost.

        Their answer that an entry does not exist is not trusted; workers treat them in the same
        way.
        """
        marks = [
            await read_marks(self.store, paths, [ledger_id])
            for paths in (self.paths, self.paths.private)
        ]
        readable = [each.mark for each in chain(*marks) if each.mark is not None]
        marked_for = {bookie for mark in readable for bookie in mark.replicas}
        stored = await read_found_bad(self.store, self.paths, ledger_id)
        if stored.is_unreadable:
            return frozenset(marked_for)
        return stored.value.bookies & marked_for if stored.value else frozenset()

    async def _so_far(self, found: VersionedMetadata) -> str:
        """Return what a failed recovery has changed, as a sentence with a space after it; empty if
        it changed nothing new.

        The error's own text says which bookies were fenced.
        """
        try:
            now = await self.manager.read(found.ledger_id)
        except (UnavailableError, SessionLostError, RejectedError):
            return ""
        is_new = found.metadata.state is LedgerState.OPEN
        if now.metadata.state is not LedgerState.IN_RECOVERY or not is_new:
            return ""
        return "The ledger is IN_RECOVERY now, and fenced bookies refuse its writer. "
