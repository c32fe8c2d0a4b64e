"""Where the bookies are that hold what is missing, and whose word does not count: for the sentence
that tells an operator what to do."""

from collections.abc import Collection

from ledgers.manager import VersionedMetadata
from ledgers.metadata import BookieId
from replication.cluster.cluster_view import ClusterView

IMPORT_HINT = (
    "every bookie was set up after the ledger: if ZooKeeper was imported, or bookie ids were changed, and no disk was "
    "wiped, bookmender bookie trust-identities says so"
)


def whereabouts(bookies: Collection[BookieId], view: ClusterView) -> str:
    """Which of them are away and may come back, and which are gone for good; empty if none is
    either.

    A bookie keeps its cookie while it is away. Decommissioned, or never there, it has none.
    """
    absent = sorted(set(bookies) - view.available)
    away = [bookie for bookie in absent if bookie in view.cookies]
    gone = [bookie for bookie in absent if bookie not in view.cookies]
    told = []
    if away:
        told.append(f"away, and wanted back: {', '.join(away)}")
    if gone:
        told.append(f"gone for good (without a cookie): {', '.join(gone)}")
    return "; ".join(told)


def not_believed(ledger: VersionedMetadata, view: ClusterView) -> str:
    """Members of the last ensemble that may have lost what they had with their disks; empty if none
    may."""
    young = view.initialised_after(ledger.stat.czxid)
    named = sorted(young.intersection(ledger.metadata.last_segment.ensemble))
    if not named:
        return ""
    told = f"; set up after the ledger was made, so its 'no' is not believed: {', '.join(named)}"
    return f"{told}; {IMPORT_HINT}" if view.are_all_younger_than(ledger.stat.czxid) else told
