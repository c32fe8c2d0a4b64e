"""``Copier``: makes the copies of a plan; and what a repair remembers of them between its
rounds."""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import structlog
from prometheus_client import Counter

from ledgers.bookies import LAST_ENTRY, Bookies
from ledgers.errors import BookmenderError, RejectedError
from ledgers.model import BookieId
from replication.cluster import ClusterView
from replication.copy_reader import NOTHING_ASKED, ReadPlan
from replication.copying import CopyJob, CopyOutcome, copy_index, lac_for_copies
from replication.history import CausedBy
from replication.inspection import Inspection
from replication.plan import Plan, Repair
from replication.recent_copies import RepairCopies
from replication.targets import CopyKey, Refusals, Targets, TargetSelector

log = structlog.get_logger()
REPAIRED_ENTRIES = Counter(
    "bookmender_repaired_entries_total", "Entries copied to their new bookie and acknowledged."
)
REPAIRED_BYTES = Counter(
    "bookmender_repaired_bytes_total", "Stored bytes of the copied entries, headers included."
)
REPAIRED_PAYLOAD_BYTES = Counter(
    "bookmender_repaired_payload_bytes_total",
    "Payload bytes of the copied entries, in the unit of bookmender_missing_copies_bytes.",
)

REMEMBERED_MAX = 10_000
"""Maximum number of ledgers whose suspects a node remembers."""


@dataclass(slots=True)
class RepairProgress:
    """State that one repair keeps between its rounds."""

    copies: RepairCopies
    """The record of copies on new targets, which are read again later (rule S6)."""
    failed: set[BookieId] = field(default_factory=set)
    """Bookies to which a copy failed. They are not tried again in this repair."""
    refilled: set[BookieId] = field(default_factory=set)
    """Bookies repaired in place. Their copies are read back (rule S15)."""
    found_bad: frozenset[BookieId] = frozenset()
    """Bookies whose copies a check or fsck found bad."""
    perhaps_bad: frozenset[BookieId] = frozenset()
    """Bookies whose copies a check may have found bad. Their "no" counts in a recovery."""
    suspects: set[BookieId] = field(default_factory=set)
    """Bookies that did not give a good copy of an entry that they should have, now or in an
    earlier repair."""
    copied: dict[CopyKey, tuple[BookieId, int]] = field(default_factory=dict)
    """Complete copies: the target, and the czxid of its registration (rule S3)."""
    has_tried_optimistically: bool = False
    """True after one attempt to copy without inspecting first. Later rounds inspect."""
    has_copied: bool = False
    """True if entries were copied, or if the metadata names a new bookie."""
    entry_count: int = 0
    entry_bytes: int = 0
    caused_by: CausedBy | None = None
    """Why the ledger needs a repair, as the first round saw it."""

    @property
    def all_suspects(self) -> frozenset[BookieId]:
        """Bookies whose copies are read entry by entry: their first and last entries prove
        nothing."""
        return self.found_bad.union(self.perhaps_bad, self.refilled, self.suspects)

    def copied_in(self, view: ClusterView) -> Mapping[CopyKey, BookieId]:
        """Return the complete copies on targets whose registration is unchanged since."""
        return {
            key: target
            for key, (target, czxid) in self.copied.items()
            if view.czxid(target) == czxid
        }


class RememberedSuspects:
    """Suspects of unfinished ledgers, for the next repair by this node, even if no note was
    written."""

    def __init__(self) -> None:
        self._of: dict[int, frozenset[BookieId]] = {}

    def of(self, ledger_id: int) -> frozenset[BookieId]:
        return self._of.get(ledger_id, frozenset())

    def pop(self, ledger_id: int) -> frozenset[BookieId]:
        return self._of.pop(ledger_id, frozenset())

    def remember(self, ledger_id: int, bookies: Collection[BookieId]) -> None:
        if bookies:
            self._of[ledger_id] = frozenset(bookies)
            if len(self._of) > REMEMBERED_MAX:  # other nodes may have repaired the oldest
                del self._of[next(iter(self._of))]


class Copier:
    """Makes copies for many ledgers at once. One for each worker."""

    def __init__(self, bookies: Bookies, target_selector: TargetSelector) -> None:
        self._bookies = bookies
        self._target_selector = target_selector
        self._refusals = Refusals()

    def targets(self, inspection: Inspection, progress: RepairProgress) -> Targets:
        view = inspection.view
        return self._target_selector.targets(
            view,
            inspection.metadata,
            refused=progress.failed | self._refusals.of(inspection.ledger_id, view),
            refilled=progress.refilled,
            copied=progress.copied_in(view),
        )

    async def copy_all(
        self,
        plan: Plan,
        inspection: Inspection,
        progress: RepairProgress,
        *,
        asked: ReadPlan = NOTHING_ASKED,
    ) -> list[CopyOutcome]:
        """``asked``: what to ask with the first copy (``CopyOutcome.gave_all_asked``)."""
        copies = [
            self._copy(repair, inspection, progress, NOTHING_ASKED if rank else asked)
            for rank, repair in enumerate(plan.repairs)
        ]
        with ExitStack() as under_way:  # all at once: the next ledger is planned in this very turn
            for repair in plan.repairs:
                under_way.enter_context(
                    self._target_selector.under_way(repair.target, repair.byte_count)
                )
            if len(copies) == 1:  # nearly always, and worth a task saved
                outcomes = [await copies[0]]
            else:
                outcomes = await asyncio.gather(*copies)
            for repair, outcome in zip(plan.repairs, outcomes, strict=True):
                self._target_selector.landed(repair.target, outcome.entry_bytes)
            return outcomes

    async def _copy(
        self, repair: Repair, inspection: Inspection, progress: RepairProgress, asked: ReadPlan
    ) -> CopyOutcome:
        view = inspection.view
        job = CopyJob(
            fragment=repair.fragment,
            index=repair.index,
            target=repair.target,
            entry_ids=repair.entry_ids,
            available=view.available,
            former=tuple(sorted(inspection.metadata.bookies - set(repair.fragment.ensemble))),
            entry_bytes_hint=inspection.entry_bytes,
            lac=lac_for_copies(inspection.metadata) if repair.rewrites_lac else None,
        )
        last_entry = await self._last_entry(repair, inspection) if repair.rewrites_lac else None
        outcome = await copy_index(
            job, bookies=self._bookies, digest=inspection.digest, asked=asked
        )
        if last_entry is not None:
            await self._show_again(last_entry, repair, inspection)
        progress.entry_count += outcome.entry_count
        progress.entry_bytes += outcome.entry_bytes
        progress.has_copied |= outcome.entry_count > 0
        REPAIRED_ENTRIES.inc(outcome.entry_count)
        REPAIRED_BYTES.inc(outcome.entry_bytes)
        REPAIRED_PAYLOAD_BYTES.inc(
            outcome.entry_bytes - outcome.entry_count * inspection.digest.overhead_bytes
        )
        if outcome.target_error is not None:
            progress.failed.add(repair.target)
            if isinstance(outcome.target_error, RejectedError):  # it will say the same again
                self._refusals.note(inspection.ledger_id, repair.target, view)
            log.warning(
                "copy.refused",
                ledger_id=inspection.ledger_id,
                bookie=repair.target,
                error=str(outcome.target_error),
            )
        elif outcome.is_complete and repair.is_in_place:
            progress.refilled.add(repair.target)
        elif outcome.is_complete:
            progress.copied[repair.key] = (repair.target, view.czxid(repair.target))
        return outcome

    async def _last_entry(self, repair: Repair, inspection: Inspection) -> bytes | None:
        """Read the last entry of a target that belongs to the last ensemble of an open
        ledger, before it gets copies.

        A bookie answers a last-entry read from its write cache, if that holds any entry of the
        ledger. So copies of earlier entries hide later ones until the next flush:

        1. The writer adds entry 20 to the target, and the target flushes it.
        2. We copy entry 5 to the target. A last-entry read now returns entry 5.
        3. A reader, or a recovery by Java, which asks for the last entry, learns too small a LAC
           from the target.

        None: it has no entry, or did not answer. Then there is nothing to hide, or its next flush
        shows it.
        """
        try:
            entry = await self._bookies.read(repair.target, inspection.ledger_id, LAST_ENTRY)
        except BookmenderError:
            return None
        is_good = inspection.digest.is_good(
            entry, ledger_id=inspection.ledger_id, entry_id=LAST_ENTRY
        )
        return entry if is_good else None

    async def _show_again(self, entry: bytes, repair: Repair, inspection: Inspection) -> None:
        """Add the target's own last entry again, byte for byte, so that its write cache holds
        it."""
        try:
            await self._bookies.add(
                repair.target, entry, master_key=inspection.digest.master_key, is_recovery=True
            )
        except BookmenderError as error:  # the next flush shows it
            log.debug("copy.last_entry_hidden", bookie=repair.target, error=str(error))
