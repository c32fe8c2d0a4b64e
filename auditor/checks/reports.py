"""What a check found wrong goes into the queue, Java's or our own, and beside it why."""

from collections import Counter

import structlog

from auditor.checks.kinds import CheckKind
from auditor.findings import Findings
from auditor.java_sight import Sight
from auditor.marking import BothQueues

log = structlog.get_logger()

LOGGED_MAX = 20
"""Ledgers that one leader names in its log for each check: a disk may lose a hundred thousand. The
queue names all of them."""


class Reports:
    """The leader's: findings are marked, not only counted."""

    def __init__(self, queues: BothQueues, findings: Findings) -> None:
        self._queues, self._findings = queues, findings
        self._logged: Counter[str] = Counter()

    async def report(
        self, kind: CheckKind, ledger_id: int, sight: Sight, detail: str
    ) -> Counter[str]:
        """``sight``: of those whose copies are at fault; of none where copies are merely in the
        wrong place.

        Counts what was ``found``, and ``marked``: marks that are new, or name more bookies now.
        """
        await self._findings.write(ledger_id, kind.name, sight.bookies, detail)
        is_news = await self._queues.mark(ledger_id, sight)
        if is_news and self._logged[kind.name] < LOGGED_MAX:
            self._logged[kind.name] += 1
            log.warning("check.found", check=kind.name, ledger_id=ledger_id, what=detail)
        return Counter(found=1, marked=int(is_news))
