"""Small values that several tests of replication speak of."""

from ledgers.fragments import Fragment
from ledgers.metadata import BookieId, LedgerMetadata, LedgerState, Segment

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
    last: int = 9,
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
