"""Counts the copies of every entry of every closed ledger; the worst entry decides what is said of
it.

Java's AuditorReplicasCheckTask asks for lists of entries, which bookies with DbLedgerStorage never
answer, counts, and leaves it at that. Ours reads every entry, unless lists are switched on, and
marks what it finds.
"""

from collections import Counter
from collections.abc import Sequence

from auditor.checks.check import Check
from auditor.checks.copies import Copies, CopyReader, most_bad
from auditor.checks.each import look_at_each
from auditor.checks.kinds import REPLICAS
from auditor.checks.reports import Reports
from ledgers.metadata import LedgerMetadata
from replication.queue.mark_tree import MarkTree

NO_COPY, BELOW_ACK_QUORUM, BELOW_WRITE_QUORUM = "no_copy", "below_ack_quorum", "below_write_quorum"
_TOLD = {
    NO_COPY: "an entry has no copy left",
    BELOW_ACK_QUORUM: "an entry has fewer copies than the ack quorum",
    BELOW_WRITE_QUORUM: "an entry has fewer copies than the write quorum",
}


class ReplicasCheck(Check):
    """``marks``: the shared queue. What is in it is known to lack copies, and is passed over."""

    kind = REPLICAS
    part_size = 20
    """Every entry is read: a part of as many ledgers as for a sample would take for ever."""
    look_size = 1

    def __init__(self, reader: CopyReader, reports: Reports, marks: MarkTree) -> None:
        self._reader = reader
        self._reports = reports
        self._marks = marks

    async def look_at(self, ledger_ids: Sequence[int]) -> Counter[str]:
        """Counts ledgers by ``worst_entry``; ``found``, ``marked``, ``unknown`` and ``unopened`` as
        ``AllLedgersCheck`` does; ``skipped``: open or empty ones, and those that are marked."""
        return await look_at_each(self.kind, ledger_ids, self._look_at_one)

    async def _look_at_one(self, ledger_id: int) -> Counter[str]:
        versioned = await self._reader.metadata(ledger_id)
        if versioned is None:
            return Counter(gone=1)
        if not _has_entries_for_good(versioned.metadata) or await self._marks.holds(ledger_id):
            return Counter(skipped=1)
        copies = await self._reader.all(versioned)
        if copies is None:
            return Counter(gone=1)
        if copies.is_key_suspect:
            return Counter(unopened=1)
        counts = Counter(unknown=int(bool(copies.unknown)))
        if (worst := worst_entry(copies)) is not None:
            counts[worst] += 1
            detail = f"{_TOLD[worst]}: {copies.detail}"
            counts += await self._reports.report(self.kind, ledger_id, copies.sight, detail)
        return counts


def worst_entry(copies: Copies) -> str | None:
    """What the entry with the fewest copies has; None where none lacks any.

    Copies that nobody knows of count as there: a bookie that cannot be reached has lost nothing
    yet.
    """
    lacking = most_bad(copies)
    left = copies.metadata.write_quorum - lacking
    if lacking == 0:
        return None
    if left <= 0:
        return NO_COPY
    return BELOW_ACK_QUORUM if left < copies.metadata.ack_quorum else BELOW_WRITE_QUORUM


def _has_entries_for_good(metadata: LedgerMetadata) -> bool:
    return metadata.is_closed and metadata.last_entry_id >= 0
