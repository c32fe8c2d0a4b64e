"""Compares where copies are with the placement policy, from the ledger map and the racks. Asks no
bookie.

Each ledger counts once, by its worst segment. Closed ledgers are counted apart from others; Java's
AuditorPlacementPolicyCheckTask looks at closed ones only. If the verdict depends on a bookie whose
rack is unknown, it is unknown, not a failure (gap G19). Without a source of racks there is nothing
to compare with, and ledgers count as ``uncompared``.

If so configured, closed ledgers that break a rule are marked, and a worker moves their copies. The
marks go to our private queue: a Java worker would find these ledgers healthy, or move copies by a
policy of its own. A ledger is marked only if some writable bookie would improve it now (gap G18)
and all its bookies are registered. One run marks at most ``MARKS_MAX`` ledgers, so that a mistake
in the file of racks does not move the copies of the whole cluster.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import structlog

from auditor.checks.base import Check, FindingReporter
from auditor.checks.records import PLACEMENT, CheckRun
from auditor.finding_marker import JavaVisibility
from auditor.ledger_map import LedgerMap, MappedLedger
from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId, LedgerState
from ledgers.placement import Adherence, Candidate, Locate, PlacementPolicy
from ledgers.tasks import task_scope
from replication.cluster import ViewSource

log = structlog.get_logger()

MARKS_MAX = 10_000
"""About how many ledgers one run marks. The next run continues, because moved ledgers are well
placed by then."""
REPORTS_AT_ONCE = 16
LEDGERS_PER_TURN = 100
"""Ledgers judged before other tasks get a turn."""

UNCOMPARED = "uncompared"
"""Counts ledgers whose verdict depends on racks that no source provides."""

_WORST_FIRST = (Adherence.FAIL, Adherence.UNKNOWN, Adherence.SOFT, Adherence.STRICT)

Ensemble = tuple[BookieId, ...]


def verdict(ledger: MappedLedger, policy: PlacementPolicy) -> Adherence:
    """Return the verdict of the ledger's worst segment."""
    found = {_adherence(ledger, ensemble, policy) for ensemble in set(ledger.ensembles)}
    return next(adherence for adherence in _WORST_FIRST if adherence in found)


def can_be_better(
    ledger: MappedLedger, policy: PlacementPolicy, candidates: Collection[Candidate]
) -> bool:
    """True if one of the candidates would improve a segment that breaks a rule."""
    return any(
        _can_be_better(ledger, ensemble, policy, candidates)
        for ensemble in _failing(ledger, policy)
    )


def _adherence(ledger: MappedLedger, ensemble: Ensemble, policy: PlacementPolicy) -> Adherence:
    return policy.adherence(
        ensemble, write_quorum=ledger.write_quorum, ack_quorum=ledger.ack_quorum
    )


def _failing(ledger: MappedLedger, policy: PlacementPolicy) -> Iterator[Ensemble]:
    for ensemble in dict.fromkeys(ledger.ensembles):
        if _adherence(ledger, ensemble, policy) is Adherence.FAIL:
            yield ensemble


def _can_be_better(
    ledger: MappedLedger,
    ensemble: Ensemble,
    policy: PlacementPolicy,
    candidates: Collection[Candidate],
) -> bool:
    try:
        policy.choose_moves(
            candidates,
            ensemble=ensemble,
            write_quorum=ledger.write_quorum,
            ack_quorum=ledger.ack_quorum,
        )
    except NotEnoughBookiesError:
        return False
    return True


class PlacementCheck(Check):
    """Counts ledgers by verdict.

    ``fail``, ``soft``, ``strict``, ``unknown``: closed ledgers; with the prefix ``open_``: others.
    ``uncompared``: instead of ``unknown``, if no source of racks is set. ``unreadable``: nothing is
    known of the ledger. ``marked``: new marks.
    """

    kind = PLACEMENT

    def __init__(
        self,
        *,
        ledger_map: LedgerMap,
        views: ViewSource,
        policy: PlacementPolicy,
        rack_of: Locate,
        has_rack_source: bool,
        reports: FindingReporter | None,
    ) -> None:
        """``reports``: marks what is found; None: ledgers are only counted."""
        self._ledger_map = ledger_map
        self._views = views
        self._policy = policy
        self._rack_of = rack_of
        self._has_rack_source = has_rack_source
        self._reports = reports
        self._marks_left = 0

    async def begin(self, run: CheckRun) -> None:
        self._marks_left = max(0, MARKS_MAX - run.counts.get("marked", 0))

    async def check_ledgers(self, ledger_ids: Sequence[int]) -> Counter[str]:
        counts: Counter[str] = Counter()
        misplaced: list[MappedLedger] = []
        for position, ledger_id in enumerate(ledger_ids):
            if position % LEDGERS_PER_TURN == 0:
                await asyncio.sleep(0)
            ledger = self._ledger_map.get(ledger_id)
            if ledger is None:
                counts["unreadable"] += 1
                continue
            found = verdict(ledger, self._policy)
            is_closed = ledger.state is LedgerState.CLOSED
            counts[self._counted_as(found, is_closed=is_closed)] += 1
            if is_closed and found is Adherence.FAIL:
                misplaced.append(ledger)
        counts["marked"] += await self._mark(misplaced)
        return counts

    def _counted_as(self, found: Adherence, *, is_closed: bool) -> str:
        if found is Adherence.UNKNOWN and not self._has_rack_source:
            return UNCOMPARED
        return found.value if is_closed else f"open_{found.value}"

    async def finish(self, run: CheckRun) -> None:
        failing = run.counts.get("fail", 0)
        if failing or run.counts.get("open_fail", 0):
            log.warning(
                "placement.broken",
                ledger_count=failing,
                open_ledger_count=run.counts.get("open_fail", 0),
                marked_count=run.counts.get("marked", 0),
            )

    async def _mark(self, misplaced: Sequence[MappedLedger]) -> int:
        """Mark the misplaced ledgers that can be improved. Return the number of new marks. Raises
        UnavailableError."""
        if self._reports is None:
            return 0
        view = self._views.current
        candidates = [Candidate(bookie=b, rack=self._rack_of(b)) for b in view.receiving]
        marked_count = 0
        for start in range(0, len(misplaced), REPORTS_AT_ONCE):
            if marked_count >= self._marks_left:
                break
            await asyncio.sleep(0)
            movable = [
                ledger
                for ledger in misplaced[start : start + REPORTS_AT_ONCE]
                # If a bookie is absent, the loss is handled first.
                if ledger.bookies <= view.checked
                and can_be_better(ledger, self._policy, candidates)
            ]
            marked_count += await self._report_all(movable)
        self._marks_left -= marked_count
        return marked_count

    async def _report_all(self, ledgers: Sequence[MappedLedger]) -> int:
        """Return the number of new marks."""
        async with task_scope() as scope:
            tasks = [scope.start(self._report(ledger)) for ledger in ledgers]
            return sum([(await task)["marked"] for task in tasks])

    async def _report(self, ledger: MappedLedger) -> Counter[str]:
        assert self._reports is not None
        ensemble = next(_failing(ledger, self._policy))
        where = ", ".join(f"{bookie} in {self._rack_of(bookie)}" for bookie in ensemble)
        return await self._reports.report(
            self.kind,
            ledger.ledger_id,
            JavaVisibility(),
            f"misplaced by the placement policy: {where}",
        )
