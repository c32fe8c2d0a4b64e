"""The calls by which a check looks at a part of the ledgers: each is made until it is through, and
once then."""

from collections import Counter
from collections.abc import Sequence

import structlog

from auditor.checks.check import Check
from ledgers.errors import (
    LeadershipLostError,
    SessionLostError,
    UnavailableError,
)
from ledgers.operations.tasks import task_scope

log = structlog.get_logger()


class Looks:
    """Of one part. ``counts``: what came of those that are through."""

    def __init__(self, check: Check, part: Sequence[int]) -> None:
        self._check = check
        size = check.look_size or len(part)
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
        return await check.look_at(part)
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
