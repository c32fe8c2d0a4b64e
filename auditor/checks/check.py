"""What a periodic check is: something that the leader does with every ledger, a part of them at a
time.

When it is due, how far it is, pauses and what happens after a crash are the ``CheckRunner``'s
business.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from auditor.checks.kinds import CheckKind
from auditor.checks.records import CheckRun


class Check(ABC):
    """One check, as the leader runs it."""

    kind: CheckKind
    part_size: int = 500
    """Ledgers that are looked at together: after each part its progress is noted. What is asked for
    at a time ``look_at`` sees to itself."""
    look_size: int | None = None
    """Of a part, how many one call of ``look_at`` is given. The calls are made side by side, and
    those that are through are not made again after a pause. None: the whole part, which is worth it
    where a ledger is cheap."""

    async def begin(self, run: CheckRun) -> None:  # noqa: B027  # most have nothing to do
        """A run begins, or goes on where an earlier leader left it (``run.cursor`` is beyond 0)."""

    @abstractmethod
    async def look_at(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Look at these ledgers, ascending; what came of it, counted by kind.

        They were there when the index was last told; one may be gone or unreadable. It may be
        cancelled at any time, and is then called again with the same ledgers, perhaps by another
        leader: only what it returns is counted. Raises UnavailableError: it is tried again.
        """

    async def finish(self, run: CheckRun) -> None:  # noqa: B027  # likewise
        """Every ledger was looked at; ``run`` holds all that was counted."""
