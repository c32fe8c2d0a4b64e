"""A part of the ledgers, looked at side by side, where one that cannot be opened stops no other."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import structlog

from auditor.checks.kinds import CheckKind
from ledgers.errors import CorruptionError, UnauthorizedError
from ledgers.operations.tasks import task_scope

log = structlog.get_logger()


async def look_at_each(
    kind: CheckKind, ledger_ids: Sequence[int], look: Callable[[int], Awaitable[Counter[str]]]
) -> Counter[str]:
    """All at once. One whose metadata cannot be read, or may not, counts as ``unopened``."""

    async def look_safely(ledger_id: int) -> Counter[str]:
        try:
            return await look(ledger_id)
        except (CorruptionError, UnauthorizedError) as error:
            log.warning("check.unopened", check=kind.name, ledger_id=ledger_id, error=str(error))
            return Counter(unopened=1)

    counts: Counter[str] = Counter()
    async with task_scope() as scope:
        for task in [scope.start(look_safely(ledger_id)) for ledger_id in ledger_ids]:
            counts += await task
    return counts
