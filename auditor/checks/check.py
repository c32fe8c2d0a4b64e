"""What a periodic check is: something that the leader does with every ledger, a part of them at a time.

When it is due, how far it is, pauses and what happens after a crash are the ``CheckRunner``'s business.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from auditor.checks.records import CheckRun
from replication.queue.payloads import Audit


class Check(ABC):
    """One kind of check. ``name``: as people and our znodes call it."""

    name: str
    interval_s: float
    """From the end of a run to the beginning of the next. 0: never, unless somebody asks for it."""
    audit: Audit | None = None
    """Whose znode keeps the time of the last run, as Java's auditor does; None: our record alone."""
    part_size: int = 100
    """Ledgers that are looked at together. Progress is noted, and a pause begins, between parts at the
    latest; ``look_at`` sees itself to what it asks for at a time."""

    async def begin(self, run: CheckRun) -> None:  # noqa: B027  # most have nothing to do
        """A run begins, or goes on where an earlier leader left it (``run.cursor`` is beyond 0)."""

    @abstractmethod
    async def look_at(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Look at these ledgers, ascending; what came of it, counted by kind.

        They were there when the index was last told; one may be gone or unreadable. May be cancelled, and
        is then called again with the same ledgers, perhaps by another leader: only what it returns is
        counted. Raises UnavailableError: it will be tried again.
        """

    async def finish(self, run: CheckRun) -> None:  # noqa: B027  # likewise
        """Every ledger was looked at; ``run`` holds all that was counted."""
