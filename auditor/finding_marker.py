"""Marks what a check or fsck found wrong, in the queue where the mark helps.

A worker of Java's AutoRecovery decides with its LedgerChecker, which reads the first and the last
entry of each bookie's part of a fragment (``auditorLedgerVerificationPercentage`` is 0 by default).
The LedgerChecker treats every answer except the entry as a loss, and checks no digest. It cannot
detect any other damage: it finds such a ledger healthy and deletes the mark within milliseconds. If
it detects damage, it copies that whole part again. So damage that Java can detect is marked in the
shared queue, and other damage in our private queue, where workers read the finding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from auditor.mark_reasons import read_findings
from auditor.marker import Marker
from ledgers.clock import Clock
from ledgers.model import BookieId, Fragment, StripedEntries
from ledgers.store import MetadataStore
from replication.entry_runs import NO_ENTRIES, EntryRuns
from replication.marks import marked_ledger_ids
from replication.transactions import Batcher
from replication.znodes import ClusterPaths


class FindingMarker:
    """Marks damaged ledgers in the shared queue, the private queue, or both."""

    def __init__(
        self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths, clock: Clock
    ) -> None:
        self._shared = Marker(store, batcher, paths, clock)
        self._private = Marker(store, batcher, paths.private, clock)

    async def mark(self, ledger_id: int, visibility: JavaVisibility) -> bool:
        """Return True if a mark is new or names more bookies now. Raises UnavailableError.

        The private mark is written first, so that a worker which completes the shared mark
        meanwhile leaves the private one.
        """
        has_changed = False
        if visibility.needs_private_mark:
            has_changed = await self._private.mark(ledger_id, visibility.hidden)
        if visibility.visible:
            has_changed |= await self._shared.mark(ledger_id, visibility.visible)
        return has_changed


# --- What Java's workers can detect ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """The damage of one bookie's copies of one ledger.

    ``entries``: entries without a good copy on the bookie, at least the first and the last such
    entry of each fragment. ``not_returned``: those of them that the bookie did not return at all.
    """

    entries: EntryRuns
    not_returned: EntryRuns = field(default_factory=lambda: NO_ENTRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaVisibility:
    """The damaged bookies of a ledger. ``visible``: bookies with damage that Java's workers can
    detect. ``hidden``: bookies with other damage. A bookie may be in both."""

    visible: frozenset[BookieId] = frozenset()
    hidden: frozenset[BookieId] = frozenset()

    @property
    def bookies(self) -> frozenset[BookieId]:
        return self.visible | self.hidden

    @property
    def needs_private_mark(self) -> bool:
        """True also if no bookie is damaged, for example if copies are only misplaced."""
        return bool(self.hidden) or not self.visible


def java_visibility(
    fragments: Iterable[Fragment],
    damage: Mapping[BookieId, Damage],
    *,
    registered: Collection[BookieId],
) -> JavaVisibility:
    """Return which damage of a ledger Java's workers can detect.

    ``fragments``: of the ledger. A fragment without a known end is ignored, because Java cannot
    check its last entry. Damage outside the fragments counts as hidden: one check too many is
    better than one too few.
    """
    visible: set[BookieId] = set()
    hidden: set[BookieId] = set()
    for fragment in fragments:
        for index, bookie in enumerate(fragment.ensemble):
            found = damage.get(bookie)
            if found is None or fragment.last_entry_id is None:
                continue
            entries = fragment.entries_of(index)
            if not entries or not found.entries.between(entries[0], entries[-1]):
                continue
            is_visible = bookie not in registered or _is_end_damaged(fragment, entries, found)
            (visible if is_visible else hidden).add(bookie)
    hidden.update(damage.keys() - visible)
    return JavaVisibility(visible=frozenset(visible), hidden=frozenset(hidden))


def _is_end_damaged(fragment: Fragment, entries: StripedEntries, found: Damage) -> bool:
    """True if the first or the last entry was not returned. The last entry counts only in a closed
    fragment: a writer may have added others by the time that Java reads."""
    is_last_damaged = fragment.is_closed and entries[-1] in found.not_returned
    return entries[0] in found.not_returned or is_last_damaged


# --- The private queue ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateQueue:
    """The ledgers marked only in our private queue. Ids ascend.

    ``damaged``: ledgers with a finding that names bookies. ``others``: ledgers marked by an
    operator's order (a drain, or a repair by hand), which may have all their copies.
    """

    damaged: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.damaged) + len(self.others)

    @property
    def ledger_ids(self) -> list[int]:
        return sorted((*self.damaged, *self.others))


async def read_private_queue(
    store: MetadataStore,
    paths: ClusterPaths,
    *,
    shared: Collection[int],
    known_damaged: Collection[int] = (),
) -> PrivateQueue:
    """Read which ledgers are marked only in our private queue.

    ``shared``: the ledgers marked in the shared queue. ``known_damaged``: ledgers found damaged by
    an earlier call. A finding stays as long as its mark, so these findings need not be read again.
    """
    ledger_ids = set(await marked_ledger_ids(store, paths.private)).difference(shared)
    damaged = ledger_ids.intersection(known_damaged)
    findings = await read_findings(store, paths, sorted(ledger_ids - damaged))
    damaged |= {ledger_id for ledger_id, found in findings.items() if found.may_be_damage}
    return PrivateQueue(damaged=tuple(sorted(damaged)), others=tuple(sorted(ledger_ids - damaged)))
