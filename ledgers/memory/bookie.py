"""What one bookie does with requests, as a plain state machine: for tests and simulations.

Behaves as bookies of 4.16 to 4.18 were seen to, where that decides anything for us: fences and what
they let through, master keys, what counts as the last entry, ledgers that were garbage-collected.
Disks, journals and the differences between storages are left out, but for a crash that forgets the
fence of a ledger without entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ledgers.bookies import LAST_ENTRY, LacAnswer, Room
from ledgers.entry import EntryHeader
from ledgers.errors import (
    FencedError,
    NoSuchEntryError,
    ReadOnlyError,
    UnauthorizedError,
    UnavailableError,
)

_BATCH_OVERHEAD_BYTES = 36
_ENTRY_OVERHEAD_BYTES = 4
_GIB = 1 << 30


@dataclass(slots=True, kw_only=True)
class _Ledger:
    """One ledger's part on this bookie."""

    master_key: bytes
    is_fenced: bool = False
    is_open: bool = True
    """Written or fenced since the bookie's start."""
    lac_record: bytes | None = None
    entries: dict[int, bytes] = field(default_factory=dict)
    unflushed: set[int] = field(default_factory=set)


class MemoryBookie:
    """One bookie. Methods that a peer can call come first, what a test does to it after them.

    Set ``is_down`` and it is gone, ``is_read_only`` and it takes no adds but high-priority ones.
    """

    def __init__(self) -> None:
        self.is_down = False
        self.is_read_only = False
        self.is_in_limbo = False
        """After an unclean shutdown without journal: cannot say "no" to a read
        (EUNKNOWNLEDGERSTATE)."""
        self.knows_batches = True
        """False: as before 4.17."""
        self.lists_entries = True
        """False: never answers that request, as with DbLedgerStorage."""
        self.room = Room(free_bytes=900 * _GIB, total_bytes=1000 * _GIB)
        """What it says of its disks; entries take nothing of it."""
        self._ledgers: dict[int, _Ledger] = {}
        self._collected: set[int] = set()
        self._index_deletions: set[int] = set()
        self.dropped: set[int] = set()
        """Ledgers of which it lost entries after it had acknowledged them."""

    # --- Requests ------------------------------------------------------------------------------

    def read(self, ledger_id: int, entry_id: int) -> bytes:
        ledger = self._ledgers.get(ledger_id)
        if ledger is not None and entry_id == LAST_ENTRY and ledger.entries:
            # The greatest in the write cache, and only if that has none the greatest of all.
            return ledger.entries[max(ledger.unflushed or ledger.entries)]
        if ledger is not None and entry_id in ledger.entries:
            return ledger.entries[entry_id]
        if self.is_in_limbo:
            raise UnavailableError("ledger in limbo", ledger_id=ledger_id)
        raise NoSuchEntryError("no such entry", ledger_id=ledger_id, entry_id=entry_id)

    def read_fencing(self, ledger_id: int, entry_id: int, *, master_key: bytes) -> bytes:
        """Fences even if the read then fails. A ledger unknown so far comes to be, with this
        key."""
        if ledger_id not in self._collected:
            self._ledger(ledger_id, master_key).is_fenced = True
        return self.read(ledger_id, entry_id)

    def read_batch(
        self, ledger_id: int, first_entry_id: int, *, count_max: int, bytes_max: int
    ) -> list[bytes]:
        entries = [self.read(ledger_id, first_entry_id)]
        room_bytes = bytes_max - _BATCH_OVERHEAD_BYTES - _weight(entries[0])
        stored = self._ledgers[ledger_id].entries
        while len(entries) < count_max and self.knows_batches:
            following = stored.get(first_entry_id + len(entries))
            if following is None or _weight(following) > room_bytes:
                break
            room_bytes -= _weight(following)
            entries.append(following)
        return entries

    def read_lac(self, ledger_id: int) -> LacAnswer:
        """In limbo too, what is not there is answered with an explicit no."""
        ledger = self._ledgers.get(ledger_id)
        if ledger is None or not (ledger.entries or ledger.lac_record):
            raise NoSuchEntryError("neither LAC nor entry", ledger_id=ledger_id)
        last_entry = self.read(ledger_id, LAST_ENTRY) if ledger.entries else None
        return LacAnswer(lac_record=ledger.lac_record, last_entry=last_entry)

    def add(
        self, entry: bytes, *, master_key: bytes, is_recovery: bool, is_high_priority: bool
    ) -> None:
        """Of two entries with the same id the newer one stays."""
        header = EntryHeader.of(entry)
        if self.is_read_only and not is_high_priority:
            raise ReadOnlyError("read-only", ledger_id=header.ledger_id)
        if header.ledger_id in self._collected:
            raise FencedError("deleted here", ledger_id=header.ledger_id)
        ledger = self._ledger(header.ledger_id, master_key)
        if ledger.is_fenced and not is_recovery:
            raise FencedError("fenced", ledger_id=header.ledger_id)
        ledger.entries[header.entry_id] = entry
        ledger.unflushed.add(header.entry_id)

    def write_lac(self, ledger_id: int, *, master_key: bytes, record: bytes) -> None:
        """A fence is no obstacle."""
        if self.is_read_only:
            raise ReadOnlyError("read-only", ledger_id=ledger_id)
        if ledger_id in self._collected:
            raise NoSuchEntryError("deleted here", ledger_id=ledger_id)
        self._ledger(ledger_id, master_key).lac_record = record

    def list_entries(self, ledger_id: int) -> Sequence[range]:
        if ledger_id not in self._ledgers:
            raise NoSuchEntryError("no such ledger", ledger_id=ledger_id)
        return _runs(sorted(self._ledgers[ledger_id].entries))

    # --- What a test does to it ----------------------------------------------------------------

    def entry_ids(self, ledger_id: int) -> frozenset[int]:
        """What it stores, without asking it."""
        ledger = self._ledgers.get(ledger_id)
        return frozenset(ledger.entries) if ledger else frozenset()

    def lose(self, ledger_id: int, entry_id: int) -> None:
        """An entry is gone from the disk, and nobody noticed."""
        ledger = self._ledgers[ledger_id]
        del ledger.entries[entry_id]
        ledger.unflushed.discard(entry_id)

    def corrupt(self, ledger_id: int, entry_id: int) -> None:
        """The last bit of an entry flips: in its payload, or in its digest if there is none."""
        entry = self._ledgers[ledger_id].entries[entry_id]
        self._ledgers[ledger_id].entries[entry_id] = entry[:-1] + bytes([entry[-1] ^ 1])

    def flush(self) -> None:
        """The write cache goes to disk, which changes what the last entry is."""
        for ledger_id in self._index_deletions:
            if self._ledgers.pop(ledger_id, None) is not None:
                self.dropped.add(ledger_id)
        self._index_deletions.clear()
        for ledger in self._ledgers.values():
            ledger.unflushed.clear()

    def collect(self, ledger_id: int) -> None:
        """Garbage collection deletes the ledger; if it was in use, all adds to it are refused from
        now on."""
        ledger = self._ledgers.pop(ledger_id, None)
        if ledger is not None and ledger.is_open:
            self._collected.add(ledger_id)

    def collect_late(self, ledger_id: int) -> None:
        """As DbLedgerStorage collects a ledger that was not in use: the next flush deletes the
        index of all its entries, also of those that are added until then."""
        self._ledgers.pop(ledger_id, None)
        self._index_deletions.add(ledger_id)

    def crash(self) -> None:
        """It goes down, and has forgotten every ledger without entries, with its key and its
        fence."""
        self.is_down = True
        self._ledgers = {id_: ledger for id_, ledger in self._ledgers.items() if ledger.entries}
        self._collected.clear()
        for ledger in self._ledgers.values():
            ledger.is_open = False

    def start(self) -> None:
        self.is_down = False

    def wipe(self) -> None:
        """New disks."""
        self._ledgers.clear()
        self._collected.clear()

    def _ledger(self, ledger_id: int, master_key: bytes) -> _Ledger:
        """The ledger, about to be written or fenced; created if it is unknown, with the key
        given."""
        ledger = self._ledgers.setdefault(ledger_id, _Ledger(master_key=master_key))
        if ledger.master_key != master_key:
            raise UnauthorizedError("not the ledger's master key", ledger_id=ledger_id)
        ledger.is_open = True
        return ledger


def _weight(entry: bytes) -> int:
    """What it takes of a batch reply."""
    return _ENTRY_OVERHEAD_BYTES + len(entry)


def _runs(entry_ids: Sequence[int]) -> list[range]:
    """Ascending ids as runs of consecutive ones."""
    runs: list[range] = []
    for entry_id in entry_ids:
        if runs and runs[-1].stop == entry_id:
            runs[-1] = range(runs[-1].start, entry_id + 1)
        else:
            runs.append(range(entry_id, entry_id + 1))
    return runs
