"""Copies that a test requests, and ledgers to copy."""

from msgspec.structs import replace

from ledgers.model import BookieId
from replication.copying import CopyJob, CopyOutcome, copy_index
from tests.replication.cluster import DIGEST, Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B7, BOOKIES, fragment
from tests.replication.nodes import LEDGER

ALL = frozenset(BOOKIES)


def job(
    *,
    index: int = 2,
    target: BookieId = B4,
    available: frozenset[BookieId] = ALL - {B3},
    former: tuple[BookieId, ...] = (),
    entry_ids: tuple[int, ...] | None = None,
    write_quorum: int = 2,
) -> CopyJob:
    """Return the copy of entries 0 to 9 on B1, B2 and B3; B4 replaces B3 by default."""
    whole = fragment(write_quorum=write_quorum)
    return CopyJob(
        fragment=whole,
        index=index,
        target=target,
        entry_ids=whole.entries_of(index) if entry_ids is None else entry_ids,
        available=available,
        former=former,
    )


async def copy(cluster: Cluster, what: CopyJob) -> CopyOutcome:
    return await copy_index(what, bookies=cluster.bookies, digest=DIGEST)


async def cluster_with_ledger(*, write_quorum: int = 2) -> Cluster:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=write_quorum)
    return cluster


def whole_ledger(
    ensemble: tuple[BookieId, ...] = BOOKIES[:3],
    *,
    entry_count: int,
    write_quorum: int = 3,
    index: int = 0,
    ledger_id: int = LEDGER,
) -> CopyJob:
    """Return the copy of everything that one bookie index stores to B7."""
    whole = replace(
        fragment(ensemble, last=entry_count - 1, write_quorum=write_quorum), ledger_id=ledger_id
    )
    return CopyJob(
        fragment=whole,
        index=index,
        target=B7,
        entry_ids=whole.entries_of(index),
        available=ALL - {ensemble[index]},
    )
