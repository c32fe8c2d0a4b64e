"""What Java's workers would see of a ledger's damage, and so in which queue it is marked. Pure.

Java's ReplicationWorker asks its LedgerChecker, which reads of each bookie's part of a fragment the
first and the last entry (``auditorLedgerVerificationPercentage`` is 0 unless set), takes any answer
but the entry for a loss, and checks no digest. Whatever else is wrong it does not see: it finds the
ledger whole and unmarks it within milliseconds. Where it does see it, it copies that whole part
anew. So in the shared queue stands only what it sees, part by part, and the rest in our own, whose
workers go by the finding.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ledgers.fragments import Fragment
from ledgers.metadata import BookieId
from ledgers.striping import StripedEntries
from replication.planning.entry_runs import NO_ENTRIES, EntryRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Of one bookie's copies of one ledger. ``bad``: entries of which it gives no good copy, at
    least the first and the last such of each fragment; ``refused``: those of them that it does not
    give at all."""

    bad: EntryRuns
    refused: EntryRuns = field(default_factory=lambda: NO_ENTRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Bookies with damage that Java's workers see, and with damage that they do not; one may be in
    both."""

    seen: frozenset[BookieId] = frozenset()
    unseen: frozenset[BookieId] = frozenset()

    @property
    def bookies(self) -> frozenset[BookieId]:
        return self.seen | self.unseen

    @property
    def needs_own_mark(self) -> bool:
        """Also where nobody is at fault, as with copies that are merely in the wrong place."""
        return bool(self.unseen) or not self.seen


def java_sight(
    fragments: Iterable[Fragment],
    damage: Mapping[BookieId, Damage],
    *,
    registered: Collection[BookieId],
) -> Sight:
    """``fragments``: of the ledger; one that ends nobody knows where has no end that Java could
    look at.

    Damage outside the fragments counts as unseen: better a look too many than one too few.
    """
    seen: set[BookieId] = set()
    unseen: set[BookieId] = set()
    for fragment in fragments:
        for index, bookie in enumerate(fragment.ensemble):
            found = damage.get(bookie)
            if found is None or not (entries := _stored(fragment, index)):
                continue
            if not found.bad.between(entries[0], entries[-1]):
                continue
            is_seen = bookie not in registered or _is_seen(fragment, entries, found)
            (seen if is_seen else unseen).add(bookie)
    unseen.update(damage.keys() - seen)
    return Sight(seen=frozenset(seen), unseen=frozenset(unseen))


def _stored(fragment: Fragment, index: int) -> StripedEntries | range:
    if fragment.last_entry_id is None:
        return range(0)
    return fragment.entries_of(index)


def _is_seen(fragment: Fragment, entries: StripedEntries | range, found: Damage) -> bool:
    """The last entry of what is still written to is another by the time that Java looks."""
    return entries[0] in found.refused or (fragment.is_closed and entries[-1] in found.refused)
