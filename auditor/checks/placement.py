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

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from auditor.checks.records import PLACEMENT, Check, CheckRun, FindingReporter
from auditor.ledger_map import LedgerMap, MappedLedger
from auditor.mark_reasons import JavaVisibility
from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId, LedgerState
from ledgers.placement import Adherence, Candidate, Locate, PlacementPolicy
from replication.cluster import ViewSource

log = structlog.get_logger()

MARKS_MAX = 10_000
"""About how many ledgers one run marks. The next run continues, because moved ledgers are well
placed by then."""

UNCOMPARED = "uncompared"
"""Counts ledgers whose verdict depends on racks that no source provides."""

_WORST_FIRST = (Adherence.FAIL, Adherence.UNKNOWN, Adherence.SOFT, Adherence.STRICT)


@dataclass(kw_only=True)
class PlacementCheck(Check):
    """Counts ledgers by verdict.

    ``fail``, ``soft``, ``strict``, ``unknown``: closed ledgers; with the prefix ``open_``: others.
    ``uncompared``: instead of ``unknown``, if no source of racks is set. ``unreadable``: nothing is
    known of the ledger. ``marked``: new marks.
    """

    kind = PLACEMENT

    ledger_map: LedgerMap
    views: ViewSource
    policy: PlacementPolicy
    rack_of: Locate
    has_rack_source: bool
    reports: FindingReporter | None
    """Marks what is found; None: ledgers are only counted."""
    _marks_left: int = field(default=0, init=False)

    async def begin(self, run: CheckRun) -> None:
        self._marks_left = max(0, MARKS_MAX - run.counts.get("marked", 0))

    async def check_ledger(self, ledger_id: int) -> Counter[str]:
        ledger = self.ledger_map.get(ledger_id)
        if ledger is None:
            return Counter(unreadable=1)
        verdicts = {
            ensemble: self.policy.adherence(
                ensemble, write_quorum=ledger.write_quorum, ack_quorum=ledger.ack_quorum
            )
            for ensemble in dict.fromkeys(ledger.ensembles)
        }
        worst = next(adherence for adherence in _WORST_FIRST if adherence in verdicts.values())
        if worst is Adherence.UNKNOWN and not self.has_rack_source:
            return Counter({UNCOMPARED: 1})
        if ledger.state is not LedgerState.CLOSED:
            return Counter({f"open_{worst.value}": 1})
        counts = Counter({worst.value: 1})
        if worst is Adherence.FAIL and self.reports is not None and self._marks_left > 0:
            failing = [ensemble for ensemble, found in verdicts.items() if found is worst]
            # If a bookie is absent, the loss is handled first.
            if ledger.bookies <= self.views.current.checked and self._can_be_better(
                ledger, failing
            ):
                where = ", ".join(f"{bookie} in {self.rack_of(bookie)}" for bookie in failing[0])
                detail = f"misplaced by the placement policy: {where}"
                marked = await self.reports.report(self.kind, ledger_id, JavaVisibility(), detail)
                self._marks_left -= marked["marked"]
                counts["marked"] = marked["marked"]
        return counts

    def _can_be_better(self, ledger: MappedLedger, failing: Sequence[tuple[BookieId, ...]]) -> bool:
        """True if some bookie that receives copies would improve a segment that breaks a rule."""
        candidates = [
            Candidate(bookie=bookie, rack=self.rack_of(bookie))
            for bookie in self.views.current.receiving
        ]
        for ensemble in failing:
            with suppress(NotEnoughBookiesError):
                self.policy.choose_moves(
                    candidates,
                    ensemble=ensemble,
                    write_quorum=ledger.write_quorum,
                    ack_quorum=ledger.ack_quorum,
                )
                return True
        return False

    async def finish(self, run: CheckRun) -> None:
        failing = run.counts.get("fail", 0)
        if failing or run.counts.get("open_fail", 0):
            log.warning(
                "placement.broken",
                ledger_count=failing,
                open_ledger_count=run.counts.get("open_fail", 0),
                marked_count=run.counts.get("marked", 0),
            )
