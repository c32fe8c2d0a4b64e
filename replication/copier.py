"""Carrying out the copies of a plan, and what a repair remembers of them from round to round.

Knows how many bytes this process has under way to each bookie, so that the next plan spreads them.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import structlog

from ledgers.bookies import Bookies
from ledgers.entry import HEADER_BYTES, EntryDigest
from ledgers.metadata import BookieId, LedgerMetadata
from replication.cluster_view import ClusterView
from replication.copying import CopyJob, CopyOutcome, copy_index
from replication.plan import CopyKey, Plan, Repair, Targets

log = structlog.get_logger()


@dataclass(slots=True)
class Memory:
    """What a repair remembers from round to round."""

    refused: set[BookieId] = field(default_factory=set)
    """Bookies that refused a copy of this ledger (rule S11)."""
    refilled: set[BookieId] = field(default_factory=set)
    """Members that were given what they lacked: to be read back (rule S15)."""
    copied: dict[CopyKey, tuple[BookieId, int]] = field(default_factory=dict)
    """Complete copies: where, and the czxid of the target's registration (rule S3)."""
    entry_count: int = 0
    entry_bytes: int = 0


class Copier:
    """Copies for many ledgers at once. One for a worker."""

    def __init__(self, bookies: Bookies, *, local: BookieId | None, local_only: bool) -> None:
        """``local``: this host's bookie. ``local_only``: it is the only target (``target = "local"``)."""
        self._bookies = bookies
        self._local = local
        self._local_only = local_only
        self._load_bytes: Counter[BookieId] = Counter()

    def targets(self, view: ClusterView, memory: Memory) -> Targets:
        writable = view.writable
        candidates = [self._local] if self._local_only else writable
        return Targets(
            load_bytes={
                b: self._load_bytes[b] for b in candidates if b is not None and b in writable
            },
            refused=frozenset(memory.refused),
            refilled=frozenset(memory.refilled),
            local=self._local,
            copied={
                key: target
                for key, (target, czxid) in memory.copied.items()
                if view.czxid(target) == czxid
            },
        )

    async def copy_all(
        self,
        plan: Plan,
        metadata: LedgerMetadata,
        digest: EntryDigest,
        view: ClusterView,
        memory: Memory,
    ) -> list[CopyOutcome]:
        copies = [self._copy(repair, metadata, digest, view, memory) for repair in plan.repairs]
        if len(copies) == 1:  # nearly always, and worth a task saved
            return [await copies[0]]
        return await asyncio.gather(*copies)

    async def _copy(
        self,
        repair: Repair,
        metadata: LedgerMetadata,
        digest: EntryDigest,
        view: ClusterView,
        memory: Memory,
    ) -> CopyOutcome:
        job = CopyJob(
            fragment=repair.fragment,
            index=repair.index,
            target=repair.target,
            entry_ids=repair.entry_ids,
            available=view.available,
            former=tuple(sorted(metadata.bookies - set(repair.fragment.ensemble))),
            entry_bytes_hint=_entry_bytes(metadata, digest),
        )
        load_bytes = len(repair.entry_ids) * job.entry_bytes_hint
        self._load_bytes[repair.target] += load_bytes
        try:
            outcome = await copy_index(job, bookies=self._bookies, digest=digest)
        finally:
            self._load_bytes[repair.target] -= load_bytes
        memory.entry_count += outcome.entry_count
        memory.entry_bytes += outcome.entry_bytes
        if outcome.target_error is not None:
            memory.refused.add(repair.target)
            log.warning(
                "copy.refused",
                ledger_id=repair.fragment.ledger_id,
                bookie=repair.target,
                error=str(outcome.target_error),
            )
        elif repair.is_in_place:
            memory.refilled.add(repair.target)
        elif outcome.is_complete:
            memory.copied[repair.key] = (repair.target, view.czxid(repair.target))
        return outcome


def _entry_bytes(metadata: LedgerMetadata, digest: EntryDigest) -> int:
    """A guess at the stored size of an entry, from what the metadata says."""
    overhead = HEADER_BYTES + digest.size
    if not metadata.is_closed or metadata.last_entry_id < 0:
        return 1024
    return overhead + max(0, metadata.length) // (metadata.last_entry_id + 1)
