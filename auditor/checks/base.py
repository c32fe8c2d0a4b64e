"""The interface of a periodic check, and what all checks share.

``Check`` is what a check implements; ``CheckRunner`` decides when a check is due, stores its
progress, and handles pauses and errors. ``FindingReporter`` marks what a check found, and stores
why.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field

import structlog

from auditor.checks.records import CheckKind, CheckRun
from auditor.finding_marker import FindingMarker, JavaVisibility
from auditor.mark_reasons import Findings


class Check(ABC):
    """A periodic check that the leader runs."""

    kind: CheckKind
    part_size: int = 500
    """Ledgers in one part. Progress is stored after each part."""
    at_once: int = 16
    """Ledgers that are checked concurrently."""

    async def begin(self, run: CheckRun) -> None:  # noqa: B027  # most have nothing to do
        """Prepare for a run. If ``run.cursor`` is above 0, an earlier leader began the run."""

    @abstractmethod
    async def check_ledger(self, ledger_id: int) -> Counter[str]:
        """Check a ledger. Return counts of the outcomes by kind.

        The ledger existed according to the ledger map; it may be deleted or unreadable by now. The
        call may be cancelled at any time, and is then repeated, perhaps by another leader. Only
        what it returns is counted. Raises UnavailableError, after which the call is repeated;
        CorruptionError or UnauthorizedError if the ledger is unreadable, and NoSuchLedgerError.
        """

    async def finish(self, run: CheckRun) -> None:  # noqa: B027  # see begin
        """Conclude a run after all ledgers were checked. ``run`` holds all counts."""


log = structlog.get_logger()

LOGGED_MAX = 20
"""Ledgers that one leader names in its log for each check. A broken disk may damage a hundred
thousand ledgers; the queue names all of them."""


@dataclass
class FindingReporter:
    """Stores findings and marks their ledgers."""

    marker: FindingMarker
    findings: Findings
    _logged: Counter[str] = field(default_factory=Counter, init=False)

    async def report(
        self, kind: CheckKind, ledger_id: int, visibility: JavaVisibility, detail: str
    ) -> Counter[str]:
        """Store the finding and mark the ledger. ``visibility``: of the damaged bookies; of none if
        copies are only misplaced.

        Returns the counts ``found``, and ``marked`` (1 if a mark is new or names more bookies now).
        """
        await self.findings.write(ledger_id, kind.name, visibility.bookies, detail)
        has_changed = await self.marker.mark(ledger_id, visibility)
        if has_changed and self._logged[kind.name] < LOGGED_MAX:
            self._logged[kind.name] += 1
            log.warning("check.found", check=kind.name, ledger_id=ledger_id, what=detail)
        return Counter(found=1, marked=int(has_changed))
