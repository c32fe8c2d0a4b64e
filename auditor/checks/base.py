"""What a periodic check is: something that the leader does with every ledger, a part of them at a
time.

When it is due, how far it is, pauses and what happens after a crash are the ``CheckRunner``'s
business.

A part of the ledgers, looked at side by side, where one that cannot be opened stops no other.

The calls by which a check looks at a part of the ledgers: each is made until it is through, and
once then.

What a check found wrong goes into the queue, Java's or our own, and beside it why.
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
    """One check, as the leader runs it."""

    kind: CheckKind
    part_size: int = 500
    """Ledgers that are looked at together: after each part its progress is noted. What is asked for
    at a time ``check_ledgers`` sees to itself."""
    call_size: int | None = None
    """Of a part, how many one call of ``check_ledgers`` is given. The calls are made side by side, and
    those that are through are not made again after a pause. None: the whole part, which is worth it
    where a ledger is cheap."""

    async def begin(self, run: CheckRun) -> None:  # noqa: B027  # most have nothing to do
        """A run begins, or goes on where an earlier leader left it (``run.cursor`` is beyond 0)."""

    @abstractmethod
    async def check_ledgers(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Look at these ledgers, ascending; what came of it, counted by kind.

        They were there when the index was last told; one may be gone or unreadable. It may be
        cancelled at any time, and is then called again with the same ledgers, perhaps by another
        leader: only what it returns is counted. Raises UnavailableError: it is tried again.
        """

    async def finish(self, run: CheckRun) -> None:  # noqa: B027  # likewise
        """Every ledger was looked at; ``run`` holds all that was counted."""


log = structlog.get_logger()


async def check_each(
    kind: CheckKind, ledger_ids: Sequence[int], look: Callable[[int], Awaitable[Counter[str]]]
) -> Counter[str]:
    """All at once. One whose metadata cannot be read, or may not, counts as ``unopened``."""

    async def look_safely(ledger_id: int) -> Counter[str]:
        try:
            return await look(ledger_id)
        except (CorruptionError, UnauthorizedError) as error:
            log.warning(
                "check.ledger_unreadable", check=kind.name, ledger_id=ledger_id, error=str(error)
            )
            return Counter(unopened=1)

    counts: Counter[str] = Counter()
    async with task_scope() as scope:
        for task in [scope.start(look_safely(ledger_id)) for ledger_id in ledger_ids]:
            counts += await task
    return counts


class PartRun:
    """Of one part. ``counts``: what came of those that are through."""

    def __init__(self, check: Check, part: Sequence[int]) -> None:
        self._check = check
        size = check.call_size or len(part)
        self._left = [part[start : start + size] for start in range(0, len(part), size)]
        self.counts: Counter[str] = Counter()

    @property
    def are_through(self) -> bool:
        return not self._left

    async def make(self) -> None:
        """Those that are left, side by side. May be cancelled, and called again.

        Raises UnavailableError or LeadershipLostError.
        """
        async with task_scope() as scope:
            for look in [scope.start(self._make(ledger_ids)) for ledger_ids in self._left]:
                await look

    async def _make(self, ledger_ids: Sequence[int]) -> None:
        counts = await _look_at_all(self._check, ledger_ids)
        self._left.remove(ledger_ids)
        self.counts += counts


async def _look_at_all(check: Check, part: Sequence[int]) -> Counter[str]:
    """A defect of ours that one ledger brings to light costs that ledger, neither the rest nor the
    leader."""
    try:
        return await check.check_ledgers(part)
    except (UnavailableError, SessionLostError, LeadershipLostError):
        raise
    except Exception as error:
        if len(part) > 1:
            counts: Counter[str] = Counter()
            for ledger_id in part:
                counts += await _look_at_all(check, [ledger_id])
            return counts
        name = check.kind.name
        log.error("check.ledger_failed", check=name, ledger_id=part[0], error=repr(error))
        return Counter(failed=1)


LOGGED_MAX = 20
"""Ledgers that one leader names in its log for each check: a disk may lose a hundred thousand. The
queue names all of them."""


class FindingReporter:
    """The leader's: findings are marked, not only counted."""

    def __init__(self, queues: FindingMarker, findings: Findings) -> None:
        self._queues, self._findings = queues, findings
        self._logged: Counter[str] = Counter()

    async def report(
        self, kind: CheckKind, ledger_id: int, visibility: JavaVisibility, detail: str
    ) -> Counter[str]:
        """``sight``: of those whose copies are at fault; of none where copies are merely in the
        wrong place.

        Counts what was ``found``, and ``marked``: marks that are new, or name more bookies now.
        """
        await self._findings.write(ledger_id, kind.name, visibility.bookies, detail)
        is_news = await self._queues.mark(ledger_id, visibility)
        if is_news and self._logged[kind.name] < LOGGED_MAX:
            self._logged[kind.name] += 1
            log.warning("check.found", check=kind.name, ledger_id=ledger_id, what=detail)
        return Counter(found=1, marked=int(is_news))
