"""The interface of a periodic check, and what all checks share.

``Check`` is what a check implements; it inspects ledgers, one part of them at a time.
``CheckRunner`` decides when a check is due, stores its progress, and handles pauses and crashes.
``PartRun`` inspects one part of the ledgers. ``FindingReporter`` marks what a check found, and
stores why.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import structlog

from auditor.checks.records import CheckKind, CheckRun
from auditor.finding_marker import FindingMarker, JavaVisibility
from auditor.mark_reasons import Findings
from ledgers.errors import (
    CorruptionError,
    LeadershipLostError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.tasks import task_scope


class Check(ABC):
    """A periodic check that the leader runs."""

    kind: CheckKind
    part_size: int = 500
    """Ledgers in one part. Progress is stored after each part. A check limits its concurrent
    requests by itself."""
    call_size: int | None = None
    """Ledgers in one call of ``check_ledgers``. The calls for one part run concurrently, and those
    that have finished are not repeated after a pause. None: one call for the whole part, which
    suits checks that need little time for a ledger."""

    async def begin(self, run: CheckRun) -> None:  # noqa: B027  # most have nothing to do
        """Prepare for a run. If ``run.cursor`` is above 0, an earlier leader began the run."""

    @abstractmethod
    async def check_ledgers(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Check these ledgers, which ascend. Return counts of the outcomes by kind.

        The ledgers existed according to the ledger map; some may be deleted or unreadable by now.
        The call may be cancelled at any time, and is then repeated with the same ledgers, perhaps
        by another leader. Only what it returns is counted. Raises UnavailableError; the call is
        then repeated.
        """

    async def finish(self, run: CheckRun) -> None:  # noqa: B027  # see begin
        """Conclude a run after all ledgers were checked. ``run`` holds all counts."""


log = structlog.get_logger()


async def check_each(
    kind: CheckKind, ledger_ids: Sequence[int], check: Callable[[int], Awaitable[Counter[str]]]
) -> Counter[str]:
    """Check these ledgers concurrently, each with ``check``. A ledger whose metadata cannot be read
    counts as ``unreadable``."""

    async def check_safely(ledger_id: int) -> Counter[str]:
        try:
            return await check(ledger_id)
        except (CorruptionError, UnauthorizedError) as error:
            log.warning(
                "check.ledger_unreadable", check=kind.name, ledger_id=ledger_id, error=str(error)
            )
            return Counter(unreadable=1)

    counts: Counter[str] = Counter()
    async with task_scope() as scope:
        for task in [scope.start(check_safely(ledger_id)) for ledger_id in ledger_ids]:
            counts += await task
    return counts


class PartRun:
    """The check of one part. ``counts``: outcomes of the calls that have finished."""

    def __init__(self, check: Check, part: Sequence[int]) -> None:
        self._check = check
        size = check.call_size or len(part)
        self._left = [part[start : start + size] for start in range(0, len(part), size)]
        self.counts: Counter[str] = Counter()

    @property
    def is_finished(self) -> bool:
        return not self._left

    async def run(self) -> None:
        """Run the calls that have not finished, concurrently. May be cancelled, and called again.

        Raises UnavailableError or LeadershipLostError.
        """
        async with task_scope() as scope:
            for call in [scope.start(self._call(ledger_ids)) for ledger_ids in self._left]:
                await call

    async def _call(self, ledger_ids: Sequence[int]) -> None:
        counts = await _check_safely(self._check, ledger_ids)
        self._left.remove(ledger_ids)
        self.counts += counts


async def _check_safely(check: Check, part: Sequence[int]) -> Counter[str]:
    """Check these ledgers. If an unexpected error stops the call, repeat it for each ledger, so
    that only the ledger that causes the error counts as failed."""
    try:
        return await check.check_ledgers(part)
    except (UnavailableError, SessionLostError, LeadershipLostError):
        raise
    except Exception as error:
        if len(part) > 1:
            counts: Counter[str] = Counter()
            for ledger_id in part:
                counts += await _check_safely(check, [ledger_id])
            return counts
        name = check.kind.name
        log.error("check.ledger_failed", check=name, ledger_id=part[0], error=repr(error))
        return Counter(failed=1)


LOGGED_MAX = 20
"""Ledgers that one leader names in its log for each check. A broken disk may damage a hundred
thousand ledgers; the queue names all of them."""


class FindingReporter:
    """Stores findings and marks their ledgers."""

    def __init__(self, marker: FindingMarker, findings: Findings) -> None:
        self._marker, self._findings = marker, findings
        self._logged: Counter[str] = Counter()

    async def report(
        self, kind: CheckKind, ledger_id: int, visibility: JavaVisibility, detail: str
    ) -> Counter[str]:
        """Store the finding and mark the ledger. ``visibility``: of the damaged bookies; of none if
        copies are only misplaced.

        Returns the counts ``found``, and ``marked`` (1 if a mark is new or names more bookies now).
        """
        await self._findings.write(ledger_id, kind.name, visibility.bookies, detail)
        has_changed = await self._marker.mark(ledger_id, visibility)
        if has_changed and self._logged[kind.name] < LOGGED_MAX:
            self._logged[kind.name] += 1
            log.warning("check.found", check=kind.name, ledger_id=ledger_id, what=detail)
        return Counter(found=1, marked=int(has_changed))
