"""Reads the records of a bookmender leader: ledger map, absent bookies, running checks, and why
ledgers are marked."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from auditor.absence import read_delay
from auditor.backlog import UnavailableLedgers
from auditor.election import current_leader
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.mark_reasons import MarkExplainer
from auditor.records import StoredAbsences, read_absences, read_leader_record
from daemon.admin_session import AdminSession
from daemon.operations.checks import CheckRow, read_checks
from daemon.status.records import PendingLossRecord
from daemon.words import loss_due_text
from ledgers.clock import Clock
from ledgers.model import BookieId
from replication.marks import MarkedLedger
from replication.nodes import live_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """The records of a bookmender leader. Mostly empty while Java leads.

    ``by_cause``: number of marked ledgers by cause; a ledger with several causes counts for each.
    ``checks``: the checks that are running.
    """

    ledger_map: LedgerMapRecord | None = None
    """None also if the leader has not recorded it yet."""
    recovery_delay_s: int = 0
    recovery_delay_error: str = ""
    """Why ``lostBookieRecoveryDelay`` cannot be read; empty if it can, or is not set."""
    pending_losses: tuple[PendingLossRecord, ...] = ()
    """In order of their time."""
    untracked: frozenset[BookieId] = frozenset()
    """Absent bookies for which no time of loss is known: no bookmender leader recorded since when
    they are absent."""
    by_cause: tuple[tuple[str, int], ...] = ()
    checks: tuple[CheckRow, ...] = ()
    named_by: Mapping[BookieId, int] = field(default_factory=dict)
    """Number of ledgers that name each absent bookie, in maintenance or not."""
    counted_age_s: float = 0.0
    """Age of ``named_by``: ledgers may have been repaired since."""
    is_count_complete: bool = False
    """True if ``named_by`` and ``unavailable`` cover all ledgers."""
    unavailable: UnavailableLedgers | None = None
    """Ledgers with entries whose every copy is on absent bookies. None: not counted since the last
    bookie came or went."""

    @property
    def loss_due_ms(self) -> Mapping[BookieId, int | None]:
        """Return when each absent bookie that is not known to be lost becomes lost. None:
        unknown."""
        return {
            **dict.fromkeys(self.untracked),
            **{each.bookie: each.lost_ms for each in self.pending_losses},
        }

    def is_named_by_none(self, bookie: BookieId) -> bool:
        """Return True if certainly no ledger names this absent bookie."""
        has_unreadable = self.ledger_map is not None and self.ledger_map.unreadable_count > 0
        return self.named_by.get(bookie) == 0 and self.is_count_complete and not has_unreadable


def loss_text(loss: PendingLossRecord, *, now_ms: int) -> str:
    text = loss_due_text(loss.lost_ms, now_ms=now_ms)
    if not loss.is_excused or loss.lost_ms <= now_ms:
        return text
    return f"{text} (delayed, because it may register again after an outage of ZooKeeper)"


async def gather_leader(
    cluster: AdminSession,
    *,
    leader_session_id: int | None,
    absent: Collection[BookieId],
    in_maintenance: Collection[BookieId] = (),
    marked: Sequence[MarkedLedger],
    clock: Clock,
) -> LeaderState:
    """Read the leader's records.

    ``leader_session_id``: None unless a bookmender node leads. ``absent``: the absent bookies that
    may become lost. ``in_maintenance``: the absent bookies that may not.
    """
    store, paths = cluster.store, cluster.paths
    delay = await read_delay(
        store, paths, default_s=cluster.settings.auditor.lost_bookie_recovery_delay_s
    )
    by_cause = tuple(sorted((await _cause_counts(cluster, marked)).items()))
    if leader_session_id is None:  # the records of an earlier leader are outdated
        return LeaderState(
            recovery_delay_s=delay.delay_s,
            recovery_delay_error=delay.refusal,
            untracked=_untracked(StoredAbsences(), absent, delay_s=delay.delay_s),
            by_cause=by_cause,
        )
    index = await read_leader_record(store, paths, LedgerMapRecord)
    is_its_own = index is not None and index.session_id == leader_session_id
    checks = await read_checks(cluster, clock=clock)
    absences, now_ms = await read_absences(store, paths), clock.wall_ms()
    is_fresh = absences.is_fresh(now_ms=now_ms)
    are_all_named = (
        is_fresh
        and absences.are_counts_complete
        and index is not None
        and is_its_own
        and index.is_complete
    )
    is_counted = is_fresh and absences.ledger_counts.keys() == {*absent, *in_maintenance}
    unavailable = absences.unavailable
    # While ledgers are still counted, zero means nothing.
    is_told = unavailable is not None and (unavailable.count > 0 or are_all_named)
    return LeaderState(
        ledger_map=index if is_its_own else None,
        recovery_delay_s=delay.delay_s,
        recovery_delay_error=delay.refusal,
        pending_losses=_pending(absences, absent, delay_s=delay.delay_s, now_ms=now_ms),
        untracked=_untracked(absences, absent, delay_s=delay.delay_s),
        by_cause=by_cause,
        checks=tuple(row for row in checks.rows if row.running is not None),
        named_by={
            b: absences.ledger_counts[b]
            for b in (*absent, *in_maintenance)
            if b in absences.ledger_counts
        }
        if is_fresh
        else {},
        counted_age_s=max(0, now_ms - absences.seen_ms) / 1000 if is_fresh else 0.0,
        is_count_complete=are_all_named,
        unavailable=unavailable if is_counted and is_told else None,
    )


async def losses_due_ms(
    cluster: AdminSession, absent: Collection[BookieId], *, clock: Clock
) -> Mapping[BookieId, int | None]:
    """Return when each absent bookie that is not known to be lost becomes lost, by the records of a
    bookmender leader. None: unknown."""
    store, paths = cluster.store, cluster.paths
    delay = await read_delay(
        store, paths, default_s=cluster.settings.auditor.lost_bookie_recovery_delay_s
    )
    is_ours = await _bookmender_leader(cluster) is not None
    absences = await read_absences(store, paths) if is_ours else StoredAbsences()
    return LeaderState(
        pending_losses=_pending(absences, absent, delay_s=delay.delay_s, now_ms=clock.wall_ms()),
        untracked=_untracked(absences, absent, delay_s=delay.delay_s),
    ).loss_due_ms


async def is_named_by_none(cluster: AdminSession, bookie: BookieId, *, clock: Clock) -> bool:
    """Return True if a bookmender leader knows that no ledger names this absent bookie."""
    session_id = await _bookmender_leader(cluster)
    if session_id is None:
        return False
    state = await gather_leader(
        cluster, leader_session_id=session_id, absent=[bookie], marked=(), clock=clock
    )
    return state.is_named_by_none(bookie)


async def _bookmender_leader(cluster: AdminSession) -> int | None:
    """Return the session ID of a bookmender leader. None: Java leads, or no auditor is elected."""
    leader = await current_leader(cluster.store, cluster.paths)
    ours = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    return leader.session_id if leader is not None and leader.session_id in ours else None


def _pending(
    absences: StoredAbsences, absent: Collection[BookieId], *, delay_s: int, now_ms: int
) -> tuple[PendingLossRecord, ...]:
    losses = []
    for bookie in set(absent) & absences.since_ms.keys():
        since_ms = absences.since_ms[bookie]
        delayed_ms, excused_ms = since_ms + delay_s * 1000, absences.excused_ms.get(bookie, 0)
        loss = PendingLossRecord(
            bookie=bookie,
            since_ms=since_ms,
            lost_ms=max(delayed_ms, excused_ms),
            is_excused=excused_ms > delayed_ms,
        )
        if loss.lost_ms > now_ms:
            losses.append(loss)
    return tuple(sorted(losses, key=lambda loss: (loss.lost_ms, loss.bookie)))


def _untracked(
    absences: StoredAbsences, absent: Collection[BookieId], *, delay_s: int
) -> frozenset[BookieId]:
    """Return the absent bookies for which no time of loss is known.

    A leader that records absences may lack a bookie that left during an outage of ZooKeeper: it is
    not lost yet. Without such a record and without a delay every absent bookie is lost.
    """
    if not absences.seen_ms and not delay_s:
        return frozenset()
    return frozenset(absent) - absences.since_ms.keys()


async def _cause_counts(cluster: AdminSession, marked: Sequence[MarkedLedger]) -> Counter[str]:
    ledger_ids = [ledger.ledger_id for ledger in marked]
    if not ledger_ids:
        return Counter()
    reasons = await MarkExplainer.read(cluster.store, cluster.paths, ledger_ids)
    return Counter(
        cause
        for ledger in marked
        for cause in {
            reason.cause
            for reason in reasons.explain(ledger.ledger_id, ledger.mark, is_private=False)
        }
    )
