"""Reads entries of every copy of every ledger, and marks the ledgers that lack some.

Java's AuditorCheckAllLedgersTask takes a time-out for a missing copy, ends with the first ledger
that it cannot open, and does not look at what it reads: ours verifies digests, and marks only what
was said twice.
"""

from collections import Counter
from collections.abc import Sequence

from auditor.checks.check import Check
from auditor.checks.copies import CopyReader
from auditor.checks.each import look_at_each
from auditor.checks.kinds import ALL_LEDGERS
from auditor.checks.reports import Reports


class AllLedgersCheck(Check):
    """``share``: of a copy's entries how many are read besides the first and the last, 0 to 1."""

    kind = ALL_LEDGERS
    part_size = 100
    """At a pace of 1,000 reads a second, and with two reads of a copy, half a second."""
    look_size = 1

    def __init__(self, reader: CopyReader, reports: Reports, *, share: float) -> None:
        self._reader = reader
        self._reports = reports
        self._share = share

    async def look_at(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Counts ledgers: ``found`` and ``marked``; ``unknown``, of which some copy was not told;
        ``unopened``, of which none was."""
        return await look_at_each(self.kind, ledger_ids, self._look_at_one)

    async def _look_at_one(self, ledger_id: int) -> Counter[str]:
        versioned = await self._reader.metadata(ledger_id)
        copies = None if versioned is None else await self._reader.sample(versioned, self._share)
        if copies is None:
            return Counter(gone=1)
        if copies.is_key_suspect:
            return Counter(unopened=1)
        counts = Counter(unknown=int(bool(copies.unknown)))
        if copies.bad:
            counts += await self._reports.report(self.kind, ledger_id, copies.sight, copies.detail)
        return counts
