"""A simple ledger map that does not save memory, for comparison with the real one."""

from auditor.ledger_map import MappedLedger
from ledgers.model import BookieId, LedgerMetadata, LedgerState
from ledgers.store import Stat


class SimpleLedgerMap:
    def __init__(self) -> None:
        self.ledgers: dict[int, MappedLedger] = {}
        self.unreadable: dict[int, int] = {}

    def put(self, ledger_id: int, metadata: LedgerMetadata, stat: Stat) -> bool:
        is_as_known = self._mzxid(ledger_id) == stat.mzxid and ledger_id in self.ledgers
        if self._mzxid(ledger_id) > stat.mzxid or is_as_known:
            return False
        self.remove(ledger_id)
        self.ledgers[ledger_id] = MappedLedger.of(ledger_id, metadata, stat)
        return True

    def put_unreadable(self, ledger_id: int, stat: Stat) -> bool:
        if self._mzxid(ledger_id) >= stat.mzxid:
            return False
        self.remove(ledger_id)
        self.unreadable[ledger_id] = stat.mzxid
        return True

    def remove(self, ledger_id: int) -> bool:
        was_unreadable = self.unreadable.pop(ledger_id, None) is not None
        return self.ledgers.pop(ledger_id, None) is not None or was_unreadable

    @property
    def ids(self) -> list[int]:
        return sorted((*self.ledgers, *self.unreadable))

    @property
    def bookies(self) -> set[BookieId]:
        return {bookie for ledger in self.ledgers.values() for bookie in ledger.bookies}

    @property
    def open_ids(self) -> set[int]:
        return {i for i, ledger in self.ledgers.items() if ledger.state is LedgerState.OPEN}

    def naming(self, bookie: BookieId) -> list[int]:
        return sorted(i for i, ledger in self.ledgers.items() if bookie in ledger.bookies)

    def _mzxid(self, ledger_id: int) -> int:
        known = self.ledgers.get(ledger_id)
        return self.unreadable.get(ledger_id, -1) if known is None else known.mzxid
