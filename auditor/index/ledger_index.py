"""Bookie -> ledgers, and of each ledger what decides how endangered it is.

Values only: ``keeper`` feeds it. A write of metadata that is older than what is known changes nothing, so
that reads may come back in any order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ledgers.metadata import BookieId, LedgerMetadata, LedgerState
from ledgers.store import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedLedger:
    """What is kept of one ledger. ``ensembles``: of its segments, in order."""

    ledger_id: int
    state: LedgerState
    write_quorum: int
    ack_quorum: int
    length: int
    """Payload bytes; 0 while it is not closed."""
    ensembles: tuple[tuple[BookieId, ...], ...]
    czxid: int
    mzxid: int

    @classmethod
    def of(cls, ledger_id: int, metadata: LedgerMetadata, stat: Stat) -> "IndexedLedger":
        return cls(
            ledger_id=ledger_id,
            state=metadata.state,
            write_quorum=metadata.write_quorum,
            ack_quorum=metadata.ack_quorum,
            length=metadata.length,
            ensembles=tuple(segment.ensemble for segment in metadata.segments),
            czxid=stat.czxid,
            mzxid=stat.mzxid,
        )

    @property
    def bookies(self) -> frozenset[BookieId]:
        """Every bookie that any segment names."""
        return frozenset().union(*self.ensembles)


class LedgerIndex:
    """All ledgers. A ledger whose metadata cannot be read is in ``unreadable``, and in nothing else."""

    def __init__(self) -> None:
        self._ledgers: dict[int, IndexedLedger] = {}
        self._by_bookie: dict[BookieId, set[int]] = {}
        self._unreadable: dict[int, int] = {}

    def __len__(self) -> int:
        """Ledgers, the unreadable ones included."""
        return len(self._ledgers) + len(self._unreadable)

    def __contains__(self, ledger_id: int) -> bool:
        return ledger_id in self._ledgers or ledger_id in self._unreadable

    def put(self, ledger_id: int, metadata: LedgerMetadata, stat: Stat) -> bool:
        """As it was read: ``stat`` is of the same read. Whether that is news."""
        if self._mzxid(ledger_id) >= stat.mzxid:
            return False
        self.remove(ledger_id)
        ledger = IndexedLedger.of(ledger_id, metadata, stat)
        self._ledgers[ledger_id] = ledger
        for bookie in ledger.bookies:
            self._by_bookie.setdefault(bookie, set()).add(ledger_id)
        return True

    def put_unreadable(self, ledger_id: int, stat: Stat) -> bool:
        """It is there, and nobody can say what it names. Whether that is news."""
        if self._mzxid(ledger_id) >= stat.mzxid:
            return False
        self.remove(ledger_id)
        self._unreadable[ledger_id] = stat.mzxid
        return True

    def remove(self, ledger_id: int) -> bool:
        """It is gone. Whether that is news."""
        was_known = ledger_id in self
        self._unreadable.pop(ledger_id, None)
        known = self._ledgers.pop(ledger_id, None)
        for bookie in () if known is None else known.bookies:
            named_by = self._by_bookie[bookie]
            named_by.discard(ledger_id)
            if not named_by:
                del self._by_bookie[bookie]
        return was_known

    def get(self, ledger_id: int) -> IndexedLedger | None:
        """None when there is no such ledger, or it is unreadable."""
        return self._ledgers.get(ledger_id)

    @property
    def unreadable(self) -> frozenset[int]:
        return frozenset(self._unreadable)

    @property
    def unreadable_count(self) -> int:
        return len(self._unreadable)

    @property
    def bookies(self) -> frozenset[BookieId]:
        """Every bookie that some ledger names."""
        return frozenset(self._by_bookie)

    def naming(self, bookie: BookieId) -> list[int]:
        """The ledgers that name it, ascending."""
        return sorted(self._by_bookie.get(bookie, ()))

    def ledger_ids(self, first: int = 0, *, count_max: int) -> list[int]:
        """At most so many known ids from ``first`` on, ascending, the unreadable ones included."""
        return sorted(i for i in (*self._ledgers, *self._unreadable) if i >= first)[:count_max]

    def ids_in(self, first: int, stop: int) -> list[int]:
        """Known ids from ``first`` to before ``stop``, ascending, the unreadable ones included."""
        return sorted(i for i in (*self._ledgers, *self._unreadable) if first <= i < stop)

    def open_ledgers(self) -> Iterator[int]:
        """Ledgers that are not closed, in no order."""
        return (i for i, x in self._ledgers.items() if x.state is not LedgerState.CLOSED)

    def _mzxid(self, ledger_id: int) -> int:
        known = self._ledgers.get(ledger_id)
        return self._unreadable.get(ledger_id, -1) if known is None else known.mzxid
