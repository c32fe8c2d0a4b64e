"""What stands in our own queue alone, where Java's workers do not look.

Damage that they would find whole, as a check or fsck found it (``java_sight``), is told from what
operators ordered: ledgers of draining bookies, and repairs by hand, that may well be whole.
"""

from collections.abc import Collection
from dataclasses import dataclass

from auditor.findings import read_findings
from ledgers.store import MetadataStore
from replication.cluster.own_state import own_path
from replication.queue.listing import marked_ledger_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnQueue:
    """Ledger ids, ascending; none of them is marked in the shared queue, too."""

    damaged: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.damaged) + len(self.others)

    @property
    def ledger_ids(self) -> list[int]:
        return sorted((*self.damaged, *self.others))


async def read_own_queue(
    store: MetadataStore, ur: str, *, shared: Collection[int], known_damaged: Collection[int] = ()
) -> OwnQueue:
    """``shared``: what is marked in the other queue. ``known_damaged``: by an earlier look; a
    finding stays until its mark is gone, so that these are not read again."""
    ledger_ids = set(await marked_ledger_ids(store, own_path(ur))).difference(shared)
    damaged = ledger_ids.intersection(known_damaged)
    findings = await read_findings(store, ur, sorted(ledger_ids - damaged))
    damaged |= {ledger_id for ledger_id, found in findings.items() if found.bookies}
    return OwnQueue(damaged=tuple(sorted(damaged)), others=tuple(sorted(ledger_ids - damaged)))
