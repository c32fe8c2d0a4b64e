"""Decides which bookies are lost or reformatted, and whether a safety hold applies.

- A bookie counts as lost when it has been absent for the recovery delay of the cluster, which
  Java's znode ``lostBookieRecoveryDelay`` holds. The first leader creates the znode from its
  setting; afterwards the znode decides. Each write takes effect at once, also after the znode was
  deleted. Java's auditor never recovers from a deletion (G29). If the znode cannot be read, the
  last delay that was read stays in force, because a delay that became shorter by mistake causes the
  repair of a healthy bookie's ledgers.
- A bookie in maintenance does not count as absent. Its delay starts at the end of the window, or at
  its departure if that is later. So an operator who ends a window early, or forgot a bookie in it,
  has the same time to act as after any other loss.
- A bookie that is absent right after an outage of our own ZooKeeper connection gets extra time
  (``Outages``). If its session ended in the same outage, it is healthy and returns by itself.
- A new leader continues the absences that the leader before it recorded (``StoredAbsences``). If no
  leader was active for a while, a bookie may have returned and disappeared again unseen, so its
  absence starts over.

``step`` returns the next state of the bookies, and the functions below it what a state means; none
of them does I/O. ``LossTracker`` keeps the state of one leadership, and its records. The auditor
acts on its decisions; observe mode reports them, and writes nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import structlog

from auditor.backlog import UnavailableLedgers
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.mark_reasons import (
    LossKind,
    LossRecord,
    LossRecords,
    loss_events,
    updated_losses,
)
from auditor.records import Records, StoredAbsences, read_audit, read_identities
from auditor.safety_hold import SafetyHolds
from auditor.settings import AuditorSettings
from auditor.underreplication import BookieLosses, reformatted_bookies
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.registration import HIDDEN_CZXID
from ledgers.store import MetadataStore
from ledgers.tasks import until_answered, wait_woken
from replication import znodes
from replication.cluster import ClusterView, ViewSource
from replication.orders import HoldOrder
from replication.records import read_stored
from replication.znodes import ClusterPaths

log = structlog.get_logger()

JOINED_MAX_S = 300.0
"""Outages count as one until this long after the first of them began. A bookie absent for longer
has another reason."""
WRITE_S = 60.0
"""Interval of the writes that only confirm that bookies are still absent. The next leader continues
from the last one."""
COUNTS_WRITE_S = 5.0
"""Minimum interval between writes that only change the counts of ledgers."""
RETRY_S = 5.0
"""Wait after a failed write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieStates:
    """The absent, lost and reformatted bookies that a leader knows. Times are monotonic seconds."""

    absent_since_s: Mapping[BookieId, float] = field(default_factory=dict)
    """Since when each bookie is absent, except bookies in maintenance."""
    in_maintenance: frozenset[BookieId] = frozenset()
    """Bookies that are in maintenance and not registered."""
    overruled_s: float = -math.inf
    """When an operator last asked not to wait any longer for the bookies absent then."""
    first_seen: Mapping[BookieId, int] = field(default_factory=dict)
    """By bookie, the cookie (czxid) with which this leader first saw it."""

    @property
    def all_absent(self) -> frozenset[BookieId]:
        """All bookies that are not registered, including those in maintenance."""
        return self.in_maintenance.union(self.absent_since_s)


def step(
    states: BookieStates,
    view: ClusterView,
    *,
    named: Collection[BookieId],
    are_ledgers_known: bool,
    now_s: float,
) -> BookieStates:
    """Return the states after ``view``. A bookie is known if it has a cookie or a ledger names it.

    ``named``: bookies that some ledger names. ``are_ledgers_known``: True if every ledger is known,
    so that ledgers name no other bookie.
    """
    known = view.cookies.keys() | named
    if not are_ledgers_known:
        known |= states.absent_since_s.keys()
    maintenance = view.orders.maintenance.keys()
    cookies = {b: c.czxid for b, c in view.cookies.items() if c.czxid != HIDDEN_CZXID}
    return replace(
        states,
        absent_since_s=still_absent(
            states.absent_since_s,
            known=known,
            available=view.available,
            excused=maintenance,
            now_s=now_s,
        ),
        in_maintenance=frozenset(maintenance - view.available),
        first_seen={**cookies, **states.first_seen},
    )


def still_absent(
    absent_since_s: Mapping[BookieId, float],
    *,
    known: Collection[BookieId],
    available: Collection[BookieId],
    excused: Collection[BookieId] = (),
    now_s: float,
) -> dict[BookieId, float]:
    """Return since when each known bookie is absent. Newly absent bookies start at ``now_s``.

    ``excused``: bookies under maintenance, which do not count as absent.
    """
    return {
        bookie: absent_since_s.get(bookie, now_s)
        for bookie in known
        if bookie not in available and bookie not in excused
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The last outage. A bookie that is not back at ``settled_s`` is absent for another reason.
    Times are monotonic seconds."""

    began_s: float = -math.inf
    settled_s: float = -math.inf

    def excuses_until_s(self, since_s: float) -> float:
        """Return until when the outage excuses an absence since ``since_s``; -inf: it does not."""
        return self.settled_s if self.began_s <= since_s <= self.settled_s else -math.inf


NO_OUTAGE = Outage()


def delay_left_s(
    absent_since_s: Mapping[BookieId, float],
    *,
    now_s: float,
    delay_s: float,
    overruled_s: float = -math.inf,
    outage: Outage = NO_OUTAGE,
) -> dict[BookieId, float]:
    """Return, by absent bookie that is not lost yet, the seconds until it counts as lost. The other
    absent bookies are lost: absent for at least the recovery delay, or since ``overruled_s`` or
    before.

    Times are monotonic seconds. ``overruled_s``: when an operator last asked not to wait any
    longer. ``outage``: the last outage of our own connection.
    """
    assert delay_s >= 0
    lost_at_s = {
        bookie: max(since_s + delay_s, outage.excuses_until_s(since_s))
        for bookie, since_s in absent_since_s.items()
        if since_s > overruled_s
    }
    return {bookie: at_s - now_s for bookie, at_s in lost_at_s.items() if now_s < at_s}


def excused_until_s(
    absent_since_s: Mapping[BookieId, float],
    *,
    overruled_s: float = -math.inf,
    outage: Outage = NO_OUTAGE,
) -> dict[BookieId, float]:
    """Return, by bookie, the time until which the outage keeps it from counting as lost, for any
    recovery delay. The arguments are those of ``delay_left_s``."""
    return {
        bookie: outage.excuses_until_s(since_s)
        for bookie, since_s in absent_since_s.items()
        if since_s > overruled_s and outage.excuses_until_s(since_s) > -math.inf
    }


# --- One leadership -------------------------------------------------------------------------------


@dataclass(kw_only=True)
class LossTracker:
    """The lost and reformatted bookies, as one leadership knows them. Call ``prepare`` first. The
    caller runs ``updater`` and ``views``."""

    updater: LedgerMapUpdater
    views: ViewSource
    holds: SafetyHolds
    settings: AuditorSettings
    outages: Outages | None = None
    """Outages of this node's ZooKeeper connection. None: outages are ignored."""

    def __post_init__(self) -> None:
        holds = self.holds
        self.store, self.paths, self.clock = holds.store, holds.paths, holds.clock
        self._default_delay_s = self.settings.lost_bookie_recovery_delay_s
        self._is_delay_created = False
        self._last_delay_s: int | None = None
        """The delay that was in force after the last reading; None before the first."""
        self.delay = Delay(delay_s=self._default_delay_s, mzxid=0, is_stored=False)
        """The recovery delay in force, after ``prepare``."""
        self.states = BookieStates()
        self.identities: dict[BookieId, int] = {}
        """By bookie, the cookie (czxid) with which its ledgers were last inspected."""
        self.hold: HoldOrder | None = None
        """The safety hold in force: nothing may be marked then."""
        self._losses: Mapping[BookieId, LossRecord] = {}
        """The stored losses: those for which ledgers were marked."""
        self._are_losses_corrupt = False
        self._is_overruled = False
        """An operator asked to treat all bookies that are absent now as lost."""
        self._looked_s: float | None = None
        """Time of the caller's last decision about lost bookies."""
        self.was_updated = asyncio.Event()
        """Set when the absences or the counts of ledgers have changed: they are written soon."""
        self._has_view = False
        self._written = StoredAbsences()
        self._written_excused_s: Mapping[BookieId, float] = {}
        self._tried_s, self._write_due_s = -math.inf, math.inf

    # --- Reading ----------------------------------------------------------------------------------

    async def create_delay(self) -> None:
        """Create the znode of the recovery delay from the setting if it is missing, as a leader."""
        data = znodes.recovery_delay_to_bytes(self._default_delay_s)
        with suppress(NodeExistsError):
            await self.store.create(self.paths.recovery_delay, data, with_parents=True)
            self._is_delay_created = True

    async def prepare(self) -> None:
        """Read the recovery delay, and continue from the records of the leader before. Raises
        UnavailableError."""
        await self._read_delay()
        is_znodes = self.delay.is_stored and not self._is_delay_created
        log.info(
            "recovery_delay.read",
            delay_s=self.delay.delay_s,
            source="lostBookieRecoveryDelay" if is_znodes else "setting",
        )
        record = await read_stored(self.store, self.paths.absences, StoredAbsences.parse)
        stored, now_s = record.value or StoredAbsences(), self.clock.now_s()
        self.states = BookieStates(
            absent_since_s=stored.resumed(now_s=now_s, wall_ms=self.clock.wall_ms())
        )
        self._written = StoredAbsences(since_ms=stored.since_ms)
        if stored.since_ms or record.is_corrupt:
            self._write_due_s = now_s
        await self.read_records()

    async def read_records(self) -> None:
        """Read for which cookies and losses leaders marked ledgers."""
        self.identities = await read_identities(self.store, self.paths)
        losses = await read_stored(self.store, self.paths.losses, LossRecords.parse)
        self._losses = losses.value.bookies if losses.value else {}
        self._are_losses_corrupt = losses.is_corrupt

    async def delay_changes(self) -> AsyncGenerator[None, None]:
        """Yield after each change of the recovery delay. Ends with the session. If the znode cannot
        be read, the delay stays as it is."""
        async with aclosing(self.store.watch(self.paths.recovery_delay)) as events:
            async for _ in events:
                before = self.delay
                await until_answered(
                    self._read_delay, event="recovery_delay.read_failed", clock=self.clock
                )
                if (now := self.delay) != before:
                    log.info("recovery_delay.changed", delay_s=now.delay_s)
                    # As with Java (Auditor's LostBookieRecoveryDelayChangedCb), a write of the same
                    # delay asks to treat absent bookies as lost at once. Operators trigger an audit
                    # this way. A readable delay after an unreadable one only corrects a mistake.
                    is_written = now.is_stored and now.mzxid != before.mzxid and not before.refusal
                    self._is_overruled |= is_written and now.delay_s == before.delay_s
                    yield

    async def _read_delay(self) -> None:
        """Read the delay in force. Logs a znode that cannot be read."""
        before, default_s = self.delay, self._default_delay_s
        self.delay = await read_delay(
            self.store, self.paths, default_s=default_s, last_s=self._last_delay_s
        )
        self._last_delay_s = self.delay.delay_s
        if self.delay.refusal and self.delay != before:
            log.warning(
                "recovery_delay.unreadable",
                error=self.delay.refusal,
                used_s=self.delay.delay_s,
                path=self.paths.recovery_delay,
                next_step="write a number of seconds to the znode, or grant access",
            )

    # --- Deciding ---------------------------------------------------------------------------------

    async def refresh(self) -> ClusterView:
        """Update the states from the current view, and return that view.

        If an operator asked to treat absent bookies as lost, read a new view first: the request
        covers bookies that this session has not yet seen absent.
        """
        is_overruled = self._is_overruled
        view = await self.views.refresh() if is_overruled else self.views.current
        self.update(view)
        if is_overruled:
            self._is_overruled = False
            self.states = replace(self.states, overruled_s=self.clock.now_s())
        return view

    def update(self, view: ClusterView) -> None:
        self.states = step(
            self.states,
            view,
            named=self.updater.ledger_map.bookies,
            are_ledgers_known=self.updater.is_complete,
            now_s=self.clock.now_s(),
        )
        self._has_view = True
        self.was_updated.set()

    async def update_hold(self, view: ClusterView) -> None:
        """Begin, extend or end a safety hold if that is due. Raises UnavailableError if it is
        unknown whether a hold is in force; then nothing may be marked."""
        updater, absent = self.updater, self.states.absent_since_s
        if updater.completed_count and updater.refusal is None and not updater.hidden:
            # Every ledger was read. A leftover cookie of a machine that was replaced long ago must
            # not cause a safety hold.
            named = updater.ledger_map.bookies
            absent = {bookie: since_s for bookie, since_s in absent.items() if bookie in named}
        self.hold = await self.holds.update(view, absent, lost_since_s=self.marked_since_s())
        self._looked_s = self.clock.now_s()

    def losses(self, view: ClusterView) -> BookieLosses:
        """Return the lost and the reformatted bookies, whether or not a hold is in force."""
        left_s = self.delay_left_s()
        return BookieLosses(
            lost_since_s={b: s for b, s in self.states.absent_since_s.items() if b not in left_s},
            reformatted=reformatted_bookies(
                view.cookies,
                self.identities,
                first_seen=self.states.first_seen,
                trusted=view.orders.trusted_cookies,
            ),
        )

    def marked_since_s(self) -> dict[BookieId, float]:
        """Return the lost bookies whose ledgers this leader or an earlier one marked, and since
        when each is absent. Monotonic seconds."""
        now_s, now_ms = self.clock.now_s(), self.clock.wall_ms()
        return {
            bookie: now_s - max(0, now_ms - loss.since_ms) / 1000
            for bookie, loss in self._losses.items()
            if loss.kind is LossKind.LOST and loss.ended_ms is None
        }

    def delay_left_s(self, *, at_s: float | None = None) -> dict[BookieId, float]:
        """Return, by absent bookie that is not lost yet, its delay left at ``at_s``; None: now."""
        return delay_left_s(
            self.states.absent_since_s,
            now_s=self.clock.now_s() if at_s is None else at_s,
            delay_s=self.delay.delay_s,
            overruled_s=self.states.overruled_s,
            outage=self._outage,
        )

    @property
    def is_loss_pending(self) -> bool:
        """True if some absent bookie is not lost yet, or if no view was seen yet."""
        return not self._has_view or bool(self.delay_left_s())

    @property
    def wait_s(self) -> float:
        """Seconds until something else may be decided without any event.

        A bookie may become lost while a round is under way, after ``losses`` was called. The
        time counts from ``update_hold``, so that the next round comes at once.
        """
        now_s = self.clock.now_s()
        looked_s = now_s if self._looked_s is None else self._looked_s
        left_s = self.delay_left_s(at_s=looked_s).values()
        return min((self.holds.wait_s, *(max(0.0, s - (now_s - looked_s)) for s in left_s)))

    @property
    def _outage(self) -> Outage:
        return NO_OUTAGE if self.outages is None else self.outages.last

    # --- Writing ----------------------------------------------------------------------------------

    async def record_losses(self, records: Records, losses: BookieLosses) -> None:
        """Write the losses if they changed, and tell the history: the ledgers of a bookie begin to
        be marked, or a loss has ended. During a safety hold nothing is written: bookies that the
        hold protects from marking are still losses."""
        if self.hold is not None:
            return
        now_s, now_ms = self.clock.now_s(), self.clock.wall_ms()
        current = {
            bookie: LossRecord(kind=LossKind.REFORMATTED, since_ms=now_ms)
            for bookie, reformatted in losses.reformatted.items()
            if reformatted.was_known
        }
        for bookie, since_s in losses.lost_since_s.items():
            since_ms = now_ms - round((now_s - since_s) * 1000)
            current[bookie] = LossRecord(kind=LossKind.LOST, since_ms=max(0, since_ms))
        before, after = self._losses, updated_losses(self._losses, current, now_ms=now_ms)
        if after != before or self._are_losses_corrupt:
            await records.write(LossRecords(bookies=after))
        self._losses, self._are_losses_corrupt = after, False
        for event in loss_events(before, after, registered=self.views.current.available):
            self.holds.history.record(event)

    async def keep_recorded(
        self,
        records: Records,
        unavailable: Callable[[Collection[BookieId]], UnavailableLedgers | None],
    ) -> None:
        """Write the absences when they change, and regularly while bookies are absent, until
        cancelled.

        Runs beside the audits, however long they take. ``unavailable``: returns the ledgers with
        entries whose every copy is on these bookies; None while they are being counted. Raises
        SessionLostError or LeadershipLostError.
        """
        while True:
            await wait_woken(self.was_updated, timeout_s=self._write_due_s - self.clock.now_s())
            self.was_updated.clear()
            try:
                await self._write_if_due(records, unavailable(self.states.all_absent))
            except UnavailableError as error:
                self._write_due_s = self.clock.now_s() + RETRY_S
                log.warning("absences.write_failed", error=str(error), retry_s=RETRY_S)

    async def _write_if_due(self, records: Records, unavailable: UnavailableLedgers | None) -> None:
        now_s, states, before = self.clock.now_s(), self.states, self._written
        excused_s = excused_until_s(
            states.absent_since_s, overruled_s=states.overruled_s, outage=self._outage
        )
        now = replace(
            StoredAbsences.of(
                states.absent_since_s, excused_s, now_s=now_s, wall_ms=self.clock.wall_ms()
            ),
            ledger_counts={b: self.updater.ledger_map.naming_count(b) for b in states.all_absent},
            are_counts_complete=self.updater.is_complete,
            unavailable=unavailable,
        )
        if now.ledger_counts and now.counts != before.counts:
            # Counts that know what the record left open are written at once.
            completes = (now.unavailable is not None and before.unavailable is None) or (
                now.are_counts_complete and not before.are_counts_complete
            )
            pause_s = 0.0 if completes else COUNTS_WRITE_S
            self._write_due_s = min(self._write_due_s, self._tried_s + pause_s)
        # A bookie stays absent when its maintenance window ends, but its recovery delay begins.
        has_changed = (
            now.ledger_counts.keys() != before.ledger_counts.keys()
            or now.since_ms.keys() != before.since_ms.keys()
            or excused_s != self._written_excused_s
        )
        if not has_changed and now_s < self._write_due_s:
            return
        self._tried_s = now_s
        await records.write(now)
        self._written, self._written_excused_s = now, excused_s
        self._write_due_s = now_s + WRITE_S if now.ledger_counts else math.inf


# --- Outages of our own connection ----------------------------------------------------------------


@dataclass
class Outages:
    """Tracks outages across the sessions of the auditor, because an outage may end a session.
    ``return_s``: the time that bookies have to return."""

    clock: Clock
    return_s: float
    _began_s: float | None = field(default=None, init=False)
    _ended: Outage = field(default_factory=Outage, init=False)

    @property
    def last(self) -> Outage:
        """The last outage. An outage that is still going on counts as if it ended now."""
        return self._ended if self._began_s is None else self._ending(self._began_s)

    async def follow(self, store: MetadataStore) -> None:
        """Track the outages of a session. Its start ends the outage that ended the session before.
        Raises SessionLostError."""
        while True:
            self.end()
            await store.wait_disconnected()
            self.begin()
            await store.wait_connected()

    def begin(self) -> None:
        """Record that the connection is lost. May be called repeatedly.

        If bookies still have time to return from the last outage, the new outage continues it, up
        to ``JOINED_MAX_S`` from its beginning. The reason: a new outage ends the sessions of
        bookies that were about to return.
        """
        if self._began_s is None:
            now_s, last = self.clock.now_s(), self._ended
            is_joined = now_s <= last.settled_s and now_s - last.began_s < JOINED_MAX_S
            self._began_s = last.began_s if is_joined else now_s

    def end(self) -> None:
        """Record that the connection is back. May be called repeatedly."""
        if self._began_s is not None:
            self._ended = self._ending(self._began_s)
            self._began_s = None
            log.info("outage.ended", return_s=self.return_s)

    def _ending(self, began_s: float) -> Outage:
        return Outage(began_s=began_s, settled_s=self.clock.now_s() + self.return_s)


# --- The recovery delay ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """The recovery delay in force. ``mzxid``: the last write of its znode; 0 if that is missing or
    access is denied."""

    delay_s: int
    mzxid: int
    is_stored: bool
    """False: the znode is missing, so ``delay_s`` is the setting, or it cannot be read."""
    refusal: str = ""
    """Why the znode cannot be read, for people; empty if it can be read or is missing."""


async def read_delay(
    store: MetadataStore, paths: ClusterPaths, *, default_s: int, last_s: int | None = None
) -> Delay:
    """Return the delay in force: ``default_s`` if the znode is missing.

    If the znode cannot be read, ``last_s`` is in force, the last delay that the caller read. A
    caller that read none uses ``default_s`` or the delay of the last audit, whichever is longer.
    """
    mzxid, refusal = 0, ""
    try:
        data, stat = await store.get(paths.recovery_delay)
        mzxid = stat.mzxid
        delay_s = znodes.parse_recovery_delay(data)
        return Delay(delay_s=delay_s, mzxid=mzxid, is_stored=True)
    except NoNodeError:
        pass
    except (CorruptionError, UnauthorizedError) as error:
        refusal = str(error)
        if last_s is None:
            audit = await read_audit(store, paths)
            last_s = max(default_s, audit.recovery_delay_s if audit else 0)
        default_s = last_s
    return Delay(delay_s=default_s, mzxid=mzxid, is_stored=False, refusal=refusal)
