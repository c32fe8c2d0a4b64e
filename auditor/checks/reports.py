"""What a check found wrong goes into the queue, and beside it why."""

from collections import Counter
from collections.abc import Collection

import structlog

from auditor.checks.kinds import CheckKind
from auditor.findings import Findings
from auditor.marking import Marker
from ledgers.metadata import BookieId

log = structlog.get_logger()

LOGGED_MAX = 20
"""Ledgers that one leader names in its log for each check: a disk may lose a hundred thousand. The queue
names all of them."""


class Reports:
    """The leader's: findings are marked, not only counted."""

    def __init__(self, marker: Marker, findings: Findings) -> None:
        self._marker, self._findings = marker, findings
        self._logged: Counter[str] = Counter()

    async def report(
        self, kind: CheckKind, ledger_id: int, bookies: Collection[BookieId], detail: str
    ) -> Counter[str]:
        """``bookies``: whose copies are at fault; none where copies are merely in the wrong place.

        Counts what was ``found``, and ``marked``: marks that are new, or name more bookies now.
        """
        await self._findings.write(ledger_id, kind.name, bookies, detail)
        is_news = await self._marker.mark(ledger_id, bookies)
        if is_news and self._logged[kind.name] < LOGGED_MAX:
            self._logged[kind.name] += 1
            log.warning("check.found", check=kind.name, ledger_id=ledger_id, what=detail)
        return Counter(found=1, marked=int(is_news))
