"""The last fragment of a ledger that is not closed: whom it is to be rid of, and what is missing of
its tail.

Its end is unknown. Up to the LAC its entries are acknowledged; those after it may be, as far as any
bookie shows them, and nobody will tell any more where the writer has died.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec import structs

from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.entry import EntryDigest
from ledgers.fragments import Fragment, fragments
from ledgers.manager import VersionedMetadata
from ledgers.metadata import BookieId, LedgerMetadata, LedgerState
from ledgers.operations.last_entries import highest_entry_id
from replication.cluster.cluster_view import ClusterView
from replication.planning.check import IndexFinding, Verdict, check
from replication.planning.entry_runs import EntryRuns, merged

ON_THEIR_WAY_S = 1.0
"""A copy that a writer has sent is there by then."""
ENTRY_BYTES_GUESS = 1_024
"""Of an entry's size, while the ledger's length is not known."""


def leaving_members(metadata: LedgerMetadata, view: ClusterView) -> tuple[BookieId, ...]:
    """Bookies that the open fragment is to be rid of; none for a closed ledger.

    Those that are gone, but for the ones under maintenance; and those that drain and may be fenced
    for it (rule S16). A read-only bookie is no reason to fence: an idle writer would lose its
    ledger for it. Java takes the fragment before the last for open too while its reader has not
    heard that its end is acknowledged (BookKeeper's pull request 3917); ours knows it from the
    metadata.
    """
    if metadata.is_closed:
        return ()
    members = metadata.last_segment.ensemble
    return tuple(sorted(bookie for bookie in members if _is_leaving(bookie, view)))


def _is_leaving(bookie: BookieId, view: ClusterView) -> bool:
    if bookie not in view.available:
        return bookie not in view.orders.maintenance
    order = view.orders.draining.get(bookie)
    return order is not None and order.may_fence


async def survey_tail(
    versioned: VersionedMetadata,
    view: ClusterView,
    *,
    digest: EntryDigest,
    lac: int,
    bookies: Bookies,
    clock: Clock,
) -> tuple[IndexFinding, ...]:
    """What is missing of the entries after the LAC that any member shows; and who does not say, as
    he may know of more.

    In recovery nobody adds any more, and every member is asked. While there may be a writer his
    copies are on their way: only who was set up after the ledger was made is asked, and that twice.
    """
    metadata = versioned.metadata
    is_abandoned = metadata.state is LedgerState.IN_RECOVERY
    members = view.checked.intersection(metadata.last_segment.ensemble)
    asked = members if is_abandoned else members & view.initialised_after(versioned.stat.czxid)
    if not asked:
        return ()
    shown, silent = await highest_entry_id(bookies, members, versioned.ledger_id, digest=digest)
    tail = structs.replace(
        fragments(versioned.ledger_id, metadata, lac=lac)[-1],
        first_entry_id=lac + 1,
        last_entry_id=max(lac, shown),
    )
    unknown = tuple(
        IndexFinding(fragment=tail, index=index, verdict=Verdict.UNKNOWN)
        for index, bookie in enumerate(tail.ensemble)
        if bookie in silent
    )
    lacking = await _lacking(tail, asked, digest=digest, bookies=bookies)
    if lacking and not is_abandoned:
        await clock.sleep(ON_THEIR_WAY_S)
        lacking = await _lacking(tail, asked, digest=digest, bookies=bookies)
    return unknown + lacking


async def _lacking(
    fragment: Fragment, asked: frozenset[BookieId], *, digest: EntryDigest, bookies: Bookies
) -> tuple[IndexFinding, ...]:
    findings = await check(
        [fragment],
        bookies=bookies,
        digest=digest,
        available=asked,
        distrusted=asked,
        entry_bytes=ENTRY_BYTES_GUESS,
    )
    return tuple(finding for finding in findings if finding.verdict is Verdict.MISSING)


def first_damaged(
    findings: Sequence[IndexFinding], *, first_entry_id: int, last_entry_id: int
) -> int | None:
    """The first entry of the range that no bookie gives a good copy of, though some have a damaged
    one.

    ``findings``: of every entry of one fragment. Both ends of the range are inclusive.
    """
    for entry_id in range(first_entry_id, last_entry_id + 1):
        holders = [f for f in findings if entry_id in f.entries]
        is_good = any(
            f.verdict in (Verdict.GOOD, Verdict.MISSING) and not f.is_bad(entry_id) for f in holders
        )
        if not is_good and any(entry_id in f.damaged for f in holders):
            return entry_id
    return None


class EndangeredEntry(Struct, frozen=True, kw_only=True):
    """An entry of an open fragment, and the members that lack it, more than it may do without."""

    entry_id: int
    lacking: tuple[BookieId, ...]


def first_endangered(
    findings: Sequence[IndexFinding], metadata: LedgerMetadata
) -> EndangeredEntry | None:
    """The first such entry; None where there is none, and of a ledger that is not OPEN.

    A writer cannot tell: who was wiped takes what he adds, and so the fragment stays as it is until
    the last copy is gone too.
    """
    if metadata.state is not LedgerState.OPEN:
        return None
    lacked = list(_lacked(findings))
    runs = [run for _, entries in lacked for run in entries.each_run()]
    steps = [(run.start, 1) for run in runs] + [(run.stop, -1) for run in runs]
    depth = 0
    for entry_id, step in sorted(steps):
        depth += step
        if depth > metadata.write_quorum - metadata.ack_quorum:
            lacking = {bookie for bookie, entries in lacked if entry_id in entries}
            return EndangeredEntry(entry_id=entry_id, lacking=tuple(sorted(lacking)))
    return None


def _lacked(findings: Sequence[IndexFinding]) -> Iterator[tuple[BookieId, EntryRuns]]:
    """What members of the open fragment lack of it, or have damaged."""
    for finding in findings:
        if finding.verdict is Verdict.MISSING and not finding.fragment.is_closed:
            yield finding.bookie, merged(finding.absent, finding.damaged)
