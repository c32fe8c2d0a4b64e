"""What the leader of ours is about, as it stands in the store: its index, who is away, a check, why
marks stand."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from auditor.absence import StoredAbsences, UnavailableLedgers, read_delay
from auditor.election import current_leader
from auditor.findings import MarkReasons
from auditor.ledger_map_updater import LedgerMapRecord, read_ledger_map_record
from auditor.records import read_absences
from daemon.admin_session import AdminSession
from daemon.cli.bookies import loss_due_text
from daemon.cli.check import CheckRow, read_checks, run_record, run_text
from daemon.cli.progress import counted, duration_text, printable
from ledgers.clock import Clock
from ledgers.model import BookieId
from replication.marks import MarkedLedger
from replication.nodes import live_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLoss:
    """A bookie that is away, and will be lost at ``due_ms`` (wall clock).

    ``is_excused``: it has that long because of an outage of ZooKeeper, not of the recovery delay.
    """

    bookie: BookieId
    since_ms: int
    due_ms: int
    is_excused: bool = False

    def to_text(self, *, now_ms: int) -> str:
        text = loss_due_text(self.due_ms, now_ms=now_ms)
        if not self.is_excused or self.due_ms <= now_ms:
            return text
        return f"{text}: its loss is held back till then, as it may register again after an outage of ZooKeeper"

    def to_json(self) -> dict[str, Any]:
        return {
            "bookie": self.bookie,
            "since_ms": self.since_ms,
            "lost_ms": self.due_ms,
            "is_excused": self.is_excused,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """``index``: None where the leader is none of ours, or has not said yet. ``pending``: the next
    one first.

    ``by_cause``: marked ledgers by why they are; one with several causes counts for each.
    ``checks``: those under way.
    """

    index: LedgerMapRecord | None = None
    recovery_delay_s: int = 0
    recovery_delay_refusal: str = ""
    """Why ``lostBookieRecoveryDelay`` cannot be read; empty where it can, or is missing."""
    pending: tuple[PendingLoss, ...] = ()
    uncounted: frozenset[BookieId] = frozenset()
    """Away while no leader of ours tells since when, though there is a recovery delay, or one that
    tells of others: lost or not, nobody knows."""
    by_cause: tuple[tuple[str, int], ...] = ()
    checks: tuple[CheckRow, ...] = ()
    naming: Mapping[BookieId, int] = field(default_factory=dict)
    """How many ledgers name each bookie that is away, on purpose or not, as the leader told
    lately."""
    counted_age_s: float = 0.0
    """How long ago the leader counted that: ledgers may have been repaired since."""
    are_all_named: bool = False
    """Whether every ledger was counted for that."""
    unavailable: UnavailableLedgers | None = None
    """The ledgers that have entries whose every copy is on a bookie that is away; None where nobody
    has counted them since the last of these went or came."""

    @property
    def unavailable_count(self) -> int:
        """As far as anybody has counted."""
        return 0 if self.unavailable is None else self.unavailable.count

    @property
    def loss_due_ms(self) -> Mapping[BookieId, int | None]:
        """Of those that are not lost as far as anybody knows; None where nobody counts."""
        return {
            **dict.fromkeys(self.uncounted),
            **{each.bookie: each.due_ms for each in self.pending},
        }

    def is_named_by_none(self, bookie: BookieId) -> bool:
        """Whether it is certain that no ledger names this bookie, which is away."""
        has_unreadable = self.index is not None and self.index.unreadable_count > 0
        return self.naming.get(bookie) == 0 and self.are_all_named and not has_unreadable

    def to_json(self) -> dict[str, Any]:
        return {
            "index": None if self.index is None else _index_record(self.index),
            "recovery_delay_s": self.recovery_delay_s,
            "recovery_delay_error": self.recovery_delay_refusal or None,
            "pending_losses": [each.to_json() for each in self.pending],
            "running_checks": [
                {"check": row.name, **run_record(row.running)} for row in self.checks if row.running
            ],
            "away_named_by": {
                "ledgers": dict(sorted(self.naming.items())),
                "is_complete": self.are_all_named,
                "counted_age_s": round(self.counted_age_s, 1),
            },
            "copyless_ledgers": None if self.unavailable is None else self.unavailable.count,
            "copyless_first": list(self.unavailable.first) if self.unavailable else [],
            "copyless_enough_for": dict(self.unavailable.enough_for) if self.unavailable else {},
        }


def _index_record(note: LedgerMapRecord) -> dict[str, Any]:
    """``ledgers``, ``unreadable``: as of ``written_ms``, when it was built, or so far; not told
    anew later."""
    return {
        "is_complete": note.is_complete,
        "ledgers": note.ledger_count,
        "unreadable": note.unreadable_count,
        "read": note.read_count,
        "expected": note.expected_count or None,
        "written_ms": note.written_ms,
    }


def index_text(note: LedgerMapRecord) -> str:
    if note.is_complete:
        return f"complete, {counted(note.ledger_count, 'ledger')} when it was built"
    read = counted(note.read_count, "ledger")
    if note.expected_count:
        read = f"{note.read_count:,} of about {counted(note.expected_count, 'ledger')}"
    return f"being built, {read} read: losses are marked as far as it knows"


def lost_text(
    bookie: BookieId,
    state: LeaderState,
    *,
    marked_count: int,
    for_windows: int = 0,
    unmarked_why: str,
) -> str:
    """``marked_count``: ledgers that are marked for it; ``for_windows``: of these, as far as it is
    known, those that wait for the maintenance of other bookies: they mostly name this one no more,
    and their marks do till then. ``unmarked_why``: none may be marked; empty if nobody knows.
    """
    why = f": {unmarked_why}" if unmarked_why and not marked_count else ""
    named_count = state.naming.get(bookie)
    wait = f"{'waits' if for_windows == 1 else 'wait'} for maintenance of others"
    if named_count is None:
        return f"{bookie}, no ledger is marked for it{why}" if why else bookie
    if named_count:
        least = "" if state.are_all_named else "at least "
        marked = f"{f'{marked_count:,}' if marked_count else 'none'} of them marked for it"
        if for_windows:
            marked = f"{marked_count:,} marked for it, {for_windows:,} of which {wait}"
        elif marked_count > named_count:  # the index is of one moment, the queue of another
            marked = f"{marked_count:,} marked for it (counted some seconds apart)"
        named = f"named by {least}{counted(named_count, 'ledger')}"
        if not marked_count and state.counted_age_s >= 1:  # they may have been repaired since
            named = f"{named} {duration_text(state.counted_age_s)} ago"
            marked = "none marked for it now"
        return f"{bookie}, {named}, {marked}{why}"
    if not state.are_all_named:
        if state.index is not None and state.index.is_complete:  # what is told is from before
            return f"{bookie}, whether any ledger names it is not known yet: the leader counts"
        return f"{bookie}, named by no ledger that was read so far{why}"
    if state.index is not None and state.index.unreadable_count:
        return f"{bookie}, named by no ledger that can be read"
    marks = f" ({for_windows:,} marked for it {wait})" if for_windows else ""
    return f"{bookie}, named by no ledger any more{marks}: start it, or bookmender bookie decommission it"


def away_text(
    bookie: BookieId, state: LeaderState, *, marked_count: int, leader: str | None, now_ms: int
) -> str:
    """``leader``: as it calls itself; None where nobody leads."""
    for loss in state.pending:
        if loss.bookie == bookie:
            return f"{bookie} {loss.to_text(now_ms=now_ms)}"
    who = "no auditor is running" if leader is None else "the leader has not told"
    delay = f"the recovery delay is {duration_text(state.recovery_delay_s)}"
    marked = f"; {counted(marked_count, 'ledger')} marked for it" if marked_count else ""
    return f"{bookie}, for how long is not known: {who}; {delay}{marked}"


def delay_text(state: LeaderState) -> str:
    """What counts while the recovery delay cannot be read; empty where it can."""
    if not state.recovery_delay_refusal:
        return ""
    return (
        f"{printable(state.recovery_delay_refusal)}: until one is written there, a leader of ours counts "
        f"{duration_text(state.recovery_delay_s)}, by its settings"
    )


def check_texts(checks: Sequence[CheckRow]) -> list[str]:
    return [f"{row.name}: {run_text(row.running)}" for row in checks if row.running is not None]


async def gather_leader(
    cluster: AdminSession,
    *,
    leader_session_id: int | None,
    away: Collection[BookieId],
    on_purpose: Collection[BookieId] = (),
    marked: Sequence[MarkedLedger],
    clock: Clock,
) -> LeaderState:
    """``leader_session_id``: of a leader of ours, else None. ``away``: who is to count as lost in
    time; ``on_purpose``: who is not."""
    store, paths = cluster.store, cluster.paths
    delay = await read_delay(
        store, paths, default_s=cluster.settings.auditor.lost_bookie_recovery_delay_s
    )
    by_cause = tuple(sorted((await _cause_counts(cluster, marked)).items()))
    if leader_session_id is None:  # what an earlier leader of ours left says nothing of now
        return LeaderState(
            recovery_delay_s=delay.delay_s,
            recovery_delay_refusal=delay.refusal,
            uncounted=_uncounted({}, away, delay_s=delay.delay_s),
            by_cause=by_cause,
        )
    index = await read_ledger_map_record(store, paths)
    is_its_own = index is not None and index.session_id == leader_session_id
    checks = await read_checks(cluster, clock=clock)
    absences, now_ms = await read_absences(store, paths), clock.wall_ms()
    is_fresh = absences.is_fresh(now_ms=now_ms)
    are_all_named = (
        is_fresh
        and absences.are_all_named
        and index is not None
        and is_its_own
        and index.is_complete
    )
    is_counted = is_fresh and absences.naming.keys() == {*away, *on_purpose}
    unavailable = absences.unavailable
    # None so far says nothing.
    is_told = unavailable is not None and (unavailable.count > 0 or are_all_named)
    return LeaderState(
        index=index if is_its_own else None,
        recovery_delay_s=delay.delay_s,
        recovery_delay_refusal=delay.refusal,
        pending=_pending(absences, away, delay_s=delay.delay_s, now_ms=now_ms),
        uncounted=_untold(absences, away, delay_s=delay.delay_s),
        by_cause=by_cause,
        checks=tuple(row for row in checks.rows if row.running is not None),
        naming={b: absences.naming[b] for b in (*away, *on_purpose) if b in absences.naming}
        if is_fresh
        else {},
        counted_age_s=max(0, now_ms - absences.seen_ms) / 1000 if is_fresh else 0.0,
        are_all_named=are_all_named,
        unavailable=unavailable if is_counted and is_told else None,
    )


async def losses_due_ms(
    cluster: AdminSession, away: Collection[BookieId], *, clock: Clock
) -> Mapping[BookieId, int | None]:
    """When those that have time left will be lost, as a leader of ours counts; None where none
    does."""
    store, paths = cluster.store, cluster.paths
    leader = await current_leader(store, paths)
    ours = {node.session_id for node in await live_nodes(store, paths)}
    delay = await read_delay(
        store, paths, default_s=cluster.settings.auditor.lost_bookie_recovery_delay_s
    )
    is_ours = leader is not None and leader.session_id in ours
    absences = await read_absences(store, paths) if is_ours else StoredAbsences()
    pending = _pending(absences, away, delay_s=delay.delay_s, now_ms=clock.wall_ms())
    uncounted = _untold(absences, away, delay_s=delay.delay_s)
    return LeaderState(pending=pending, uncounted=uncounted).loss_due_ms


async def is_named_by_none(cluster: AdminSession, bookie: BookieId, *, clock: Clock) -> bool:
    """Whether a leader of ours knows for certain that no ledger names this bookie, which is
    away."""
    leader = await current_leader(cluster.store, cluster.paths)
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    if leader is None or leader.session_id not in ours:
        return False
    state = await gather_leader(
        cluster, leader_session_id=leader.session_id, away=[bookie], marked=(), clock=clock
    )
    return state.is_named_by_none(bookie)


def _pending(
    absences: StoredAbsences, away: Collection[BookieId], *, delay_s: int, now_ms: int
) -> tuple[PendingLoss, ...]:
    losses = []
    for bookie in away:
        if bookie in absences.since_ms:
            since_ms = absences.since_ms[bookie]
            delayed_ms, excused_ms = since_ms + delay_s * 1000, absences.excused_ms.get(bookie, 0)
            loss = PendingLoss(
                bookie=bookie,
                since_ms=since_ms,
                due_ms=max(delayed_ms, excused_ms),
                is_excused=excused_ms > delayed_ms,
            )
            losses.append(loss)
    return tuple(
        sorted(
            (loss for loss in losses if loss.due_ms > now_ms),
            key=lambda loss: (loss.due_ms, loss.bookie),
        )
    )


def _uncounted(
    since_ms: Mapping[BookieId, int], away: Collection[BookieId], *, delay_s: int
) -> frozenset[BookieId]:
    """Without a delay whoever is away is lost, whenever it went."""
    return frozenset(b for b in away if b not in since_ms) if delay_s else frozenset()


def _untold(
    absences: StoredAbsences, away: Collection[BookieId], *, delay_s: int
) -> frozenset[BookieId]:
    """Whom a leader of ours has not told of yet, though it tells who is away, may have gone in an
    outage of ZooKeeper."""
    if absences.seen_ms:
        return frozenset(away) - absences.since_ms.keys()
    return _uncounted(absences.since_ms, away, delay_s=delay_s)


async def _cause_counts(cluster: AdminSession, marked: Sequence[MarkedLedger]) -> Counter[str]:
    ledger_ids = [ledger.ledger_id for ledger in marked]
    if not ledger_ids:
        return Counter()
    reasons = await MarkReasons.read(cluster.store, cluster.paths, ledger_ids)
    return Counter(
        cause
        for ledger in marked
        for cause in {
            reason.cause for reason in reasons.of(ledger.ledger_id, ledger.mark, is_own=False)
        }
    )
