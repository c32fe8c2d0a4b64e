"""Small values for several tests of replication."""

from collections.abc import Iterable, Mapping, Sequence

from ledgers.digest import EntryDigest
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, DigestType, Fragment, LedgerMetadata, LedgerState, Segment
from ledgers.registration import BookieView, RegisteredBookie
from ledgers.store import Stat
from replication.cluster import ClusterView
from replication.copy_reader import CopyFinding
from replication.inspection import Inspection
from replication.orders import Orders

BOOKIES = tuple(BookieId(f"b{number}:3181") for number in range(1, 8))
B1, B2, B3, B4, B5, B6, B7 = BOOKIES


def closed_ledger(
    *ensembles: tuple[BookieId, ...],
    write_quorum: int = 2,
    last_entry_id: int = 9,
    starts: tuple[int, ...] = (0,),
) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=len(ensembles[0]),
        write_quorum=write_quorum,
        ack_quorum=1,
        state=LedgerState.CLOSED,
        last_entry_id=last_entry_id,
        length=100 * (last_entry_id + 1),
        segments=tuple(
            Segment(first_entry_id=start, ensemble=ensemble)
            for start, ensemble in zip(starts, ensembles, strict=True)
        ),
    )


def fragment(
    ensemble: tuple[BookieId, ...] = (B1, B2, B3),
    *,
    first: int = 0,
    last: int | None = 9,
    write_quorum: int = 2,
    is_closed: bool = True,
) -> Fragment:
    return Fragment(
        ledger_id=7,
        first_entry_id=first,
        last_entry_id=last,
        ensemble=ensemble,
        write_quorum=write_quorum,
        is_closed=is_closed,
    )


def registered(
    bookies: Iterable[BookieId] | Mapping[BookieId, int],
) -> dict[BookieId, RegisteredBookie]:
    """Return writable bookies. A mapping has the czxids of their registrations; else all are 1."""
    czxids = bookies if isinstance(bookies, Mapping) else dict.fromkeys(bookies, 1)
    return {
        bookie: RegisteredBookie(bookie_id=bookie, address=None, czxid=czxid, is_writable=True)
        for bookie, czxid in czxids.items()
    }


def inspection_of(
    findings: Sequence[CopyFinding],
    metadata: LedgerMetadata | None = None,
    orders: Orders | None = None,
) -> Inspection:
    """Return the inspection of ledger 7; by default it is closed, on B1, B2 and B3."""
    return Inspection(
        versioned=VersionedMetadata(
            ledger_id=7,
            metadata=metadata or closed_ledger((B1, B2, B3)),
            stat=Stat(version=0),
            data=b"",
        ),
        view=ClusterView(bookies=BookieView(), orders=orders or Orders()),
        digest=EntryDigest(DigestType.CRC32C, b""),
        findings=tuple(findings),
    )
