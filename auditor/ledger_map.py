"""The ledger map: which ledgers name a bookie, and what decides how urgent each ledger is.

No I/O; ``ledger_map_updater`` fills the map. A write of metadata that is older than the known one
changes nothing, so reads may arrive in any order.

A ledger takes about 60 bytes (three bookies, one segment). Ledgers are rows of ``LedgerBlock``s,
arrays of some hundred ledgers with neighbouring ids; a Python object for each would take ten times
as much memory. Rows name bookies by number (``Numbering``). The ids of each bookie's ledgers are in
a bitmap, at two to three bytes each. Only ids drawn at random from 63 bits take more: about 120.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from itertools import islice, takewhile
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct
from pyroaring import BitMap64

from ledgers.model import BookieId, LedgerMetadata, LedgerOutline, LedgerState
from ledgers.store import Stat

BLOCK_MAX = 1024
"""Ledgers in one block. Adding a ledger moves at most this many."""
OPENED_MAX = 1_000
"""Ledger ids kept for ``opened_since``."""

WriteSets = tuple[tuple[int, int], ...]
"""The used write sets, for each segment: the first entry's id modulo the ensemble size, and the
number of write sets in use from there on. Empty in the usual case that every segment uses all its
write sets."""
Shape = tuple[LedgerState, int, int, int, WriteSets]
"""State, write quorum, ack quorum, ensemble size and used write sets. Many ledgers share few
shapes."""

T = TypeVar("T", bound=Hashable)


class MappedLedger(Struct, frozen=True, kw_only=True):
    """The part of a ledger's metadata that the map keeps. ``ensembles``: by segment, in order."""

    ledger_id: int
    state: LedgerState
    write_quorum: int
    ack_quorum: int
    length: int
    """Payload bytes; 0 while the ledger is not closed."""
    ensembles: tuple[tuple[BookieId, ...], ...]
    write_sets: WriteSets = ()
    czxid: int
    mzxid: int

    @classmethod
    def of(cls, ledger_id: int, metadata: LedgerMetadata, stat: Stat) -> MappedLedger:
        return cls(
            ledger_id=ledger_id,
            state=metadata.state,
            write_quorum=metadata.write_quorum,
            ack_quorum=metadata.ack_quorum,
            length=metadata.length,
            ensembles=tuple(segment.ensemble for segment in metadata.segments),
            write_sets=used_write_sets(metadata),
            czxid=stat.czxid,
            mzxid=stat.mzxid,
        )

    @property
    def bookies(self) -> frozenset[BookieId]:
        """Every bookie that any segment names."""
        return frozenset().union(*self.ensembles)


class LedgerMap:
    """All ledgers. A ledger with unreadable metadata is only in ``unreadable``."""

    def __init__(self) -> None:
        self._blocks: list[LedgerBlock] = []
        """Not empty; the ids of each block lie between those of its neighbours."""
        self._firsts: list[int] = []
        """The first id of each block, or a lower one that was removed."""
        self._ids = BitMap64()
        """All ids, including those of unreadable ledgers."""
        self._shapes: Numbering[Shape] = Numbering()
        self._bookies: Numbering[BookieId] = Numbering()
        self._naming: list[BitMap64] = []
        """By the bookie's number, the ledgers that name it."""
        self._found: tuple[int, tuple[LedgerBlock, int]] | None = None
        """The ledger that ``_find`` found last, and its place, until a place changes. A change
        looks its ledger up several times in a row."""
        self._unreadable: dict[int, int] = {}
        """By ledger id, the mzxid."""
        self.open_ids: set[int] = set()
        """Ledgers in state OPEN, without those of the change feed: clients may write to them."""
        self._opened: deque[int] = deque(maxlen=OPENED_MAX)
        """The ledgers that entered ``open_ids`` last."""
        self.opened_count = 0
        """Number of times that a ledger entered ``open_ids``, including the first scan."""

    def __len__(self) -> int:
        """Return the number of ledgers, including unreadable ones."""
        return len(self._ids)

    def put(self, ledger_id: int, metadata: LedgerMetadata | LedgerOutline, stat: Stat) -> bool:
        """Store what was read; ``stat`` is of the same read. Return True if it is new."""
        place = self._find(ledger_id)
        known_mzxid = self._mzxid(ledger_id, place)
        # An unreadable ledger may become readable without a write, because its ACL was changed.
        if known_mzxid > stat.mzxid or (known_mzxid == stat.mzxid and place is not None):
            return False
        self._unreadable.pop(ledger_id, None)
        self._ids.add(ledger_id)
        row = self._row_of(metadata, stat)
        if metadata.state is LedgerState.OPEN and not metadata.is_of_feed:
            if ledger_id not in self.open_ids:
                self.open_ids.add(ledger_id)
                self._opened.append(ledger_id)
                self.opened_count += 1
        else:
            self.open_ids.discard(ledger_id)
        if place is None:
            self._update_naming(ledger_id, was=None, now=row)
            self._insert(ledger_id, row)
        else:
            block, position = place
            if block.words(position) != row.words:
                self._update_naming(ledger_id, was=block.row(position), now=row)
            block.replace(position, row)
        return True

    def put_unreadable(self, ledger_id: int, stat: Stat | None) -> bool:
        """Store that the ledger exists, and its bookies are unknown. Return True if that is new.
        ``stat``: None if ACLs deny access to it too. Then the known state may be outdated."""
        known_mzxid = self._mzxid(ledger_id, self._find(ledger_id))
        if known_mzxid >= stat.mzxid if stat else ledger_id in self._unreadable:
            return False
        self.remove(ledger_id)
        self._ids.add(ledger_id)
        self._unreadable[ledger_id] = stat.mzxid if stat else max(known_mzxid, 0)
        return True

    def remove(self, ledger_id: int) -> bool:
        """Remove a deleted ledger. Return True if it was known."""
        if ledger_id not in self._ids:
            return False
        self._ids.discard(ledger_id)
        place = self._find(ledger_id)
        if place is None:
            del self._unreadable[ledger_id]
            return True
        block, position = place
        self.open_ids.discard(ledger_id)
        self._update_naming(ledger_id, was=block.row(position), now=None)
        self._found = None
        block.delete(position)
        number = bisect_right(self._firsts, ledger_id) - 1
        if not block:
            del self._blocks[number], self._firsts[number]
        return True

    def __contains__(self, ledger_id: int) -> bool:
        return ledger_id in self._ids

    def mzxid(self, ledger_id: int) -> int:
        """Return the known mzxid of a ledger; 0 if it does not exist. An unreadable ledger whose
        mzxid was never known has 0, too."""
        return max(0, self._mzxid(ledger_id, self._find(ledger_id)))

    def versions(self, first: int, *, count_max: int) -> tuple[dict[int, int], int | None]:
        """Return the mzxids of ledgers from ``first`` on, by ledger id, and where to continue; None
        at the end. At most ``count_max`` ledgers and those of one block are returned."""
        found: dict[int, int] = {}
        stop: int | None = None
        # The first block may also hold lower ids.
        for number in range(max(0, bisect_right(self._firsts, first) - 1), len(self._blocks)):
            block = self._blocks[number]
            if len(found) >= count_max:
                stop = block.ids[0]
                break
            begin = bisect_left(block.ids, first)
            found.update(zip(block.ids[begin:], block.mzxids[begin:], strict=True))
        for ledger_id, mzxid in self._unreadable.items():
            if ledger_id >= first and (stop is None or ledger_id < stop):
                found[ledger_id] = mzxid
        return found, stop

    def is_known(self, ledger_id: int, *, mzxid: int) -> bool:
        """True if the metadata is known as of this write or a later one."""
        place = self._find(ledger_id)
        return place is not None and self._mzxid(ledger_id, place) >= mzxid

    def get(self, ledger_id: int) -> MappedLedger | None:
        """Return the ledger; None if it does not exist or is unreadable."""
        place = self._find(ledger_id)
        if place is None:
            return None
        row = place[0].row(place[1])
        state, write_quorum, ack_quorum, ensemble_size, write_sets = self._shapes.values[
            row.words[0]
        ]
        names = tuple([self._bookies.values[number] for number in row.words[1:]])
        return MappedLedger(
            ledger_id=ledger_id,
            state=state,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            length=row.length,
            ensembles=tuple(
                names[start : start + ensemble_size]
                for start in range(0, len(names), ensemble_size)
            ),
            write_sets=write_sets,
            czxid=row.czxid,
            mzxid=row.mzxid,
        )

    @property
    def unreadable(self) -> frozenset[int]:
        return frozenset(self._unreadable)

    @property
    def unreadable_count(self) -> int:
        return len(self._unreadable)

    def opened_since(self, opened_count: int) -> list[int]:
        """Return the ledgers that entered ``open_ids`` since that count, at most ``OPENED_MAX``."""
        count = min(self.opened_count - opened_count, len(self._opened))
        return [self._opened[-number] for number in range(count, 0, -1)]

    @property
    def bookies(self) -> frozenset[BookieId]:
        """All bookies that some ledger names."""
        named = zip(self._bookies.values, self._naming, strict=True)
        return frozenset(bookie for bookie, ledger_ids in named if ledger_ids)

    def naming_any(self, bookies: Iterable[BookieId]) -> BitMap64:
        """Return the ledgers that name any of the bookies. The caller may change the bitmap."""
        found = BitMap64()
        for bookie in bookies:
            if (number := self._bookies.numbers.get(bookie)) is not None:
                found |= self._naming[number]
        return found

    def naming_count(self, bookie: BookieId) -> int:
        """Return how many ledgers name the bookie."""
        number = self._bookies.numbers.get(bookie)
        return 0 if number is None else len(self._naming[number])

    def naming_several(
        self, bookies: Collection[BookieId], *, count_least: int, first: int = 0
    ) -> tuple[list[int], int | None]:
        """Return the ledgers of one block, from ``first`` on, that name at least ``count_least`` of
        these bookies, ascending; and where to continue, None at the end."""
        found = [self._bookies.numbers.get(bookie) for bookie in bookies]
        naming = [self._naming[number] for number in found if number is not None]
        block_number = bisect_right(self._firsts, first)
        if len(naming) < count_least or not self._blocks:
            return [], None
        stop = self._firsts[block_number] if block_number < len(self._firsts) else None
        counts = Counter(i for ledger_ids in naming for i in _between(ledger_ids, first, stop))
        return sorted(i for i, count in counts.items() if count >= count_least), stop

    @property
    def write_quorum_least(self) -> int:
        """The smallest write quorum of any ledger that exists or existed; 1 if there was none."""
        return min((shape[1] for shape in self._shapes.values), default=1)

    def ledger_ids(self, first: int = 0, *, count_max: int) -> list[int]:
        """Return at most ``count_max`` ids from ``first`` on, ascending, unreadable ones too."""
        return list(islice(self._ids.iter_equal_or_larger(first), count_max))

    def ids_in(self, first: int, stop: int) -> list[int]:
        """Return the ids from ``first`` to before ``stop``, ascending, also unreadable ledgers."""
        return list(_between(self._ids, first, stop))

    # --- Rows -------------------------------------------------------------------------------------

    def _row_of(self, metadata: LedgerMetadata | LedgerOutline, stat: Stat) -> Row:
        shape = (
            *(metadata.state, metadata.write_quorum),
            *(metadata.ack_quorum, metadata.ensemble_size),
            used_write_sets(metadata),
        )
        words = array("I", (self._shapes.number(shape),))
        for segment in metadata.segments:
            words.extend(map(self._number, segment.ensemble))
        return Row(stat.czxid, stat.mzxid, metadata.length, words)

    def _number(self, bookie: BookieId) -> int:
        number = self._bookies.number(bookie)
        if number == len(self._naming):
            self._naming.append(BitMap64())
        return number

    def _update_naming(self, ledger_id: int, *, was: Row | None, now: Row | None) -> None:
        """Update the id sets of the bookies that the ledger named before and names now."""
        before, after = _bookies(was), _bookies(now)
        for number in before - after:
            self._naming[number].remove(ledger_id)
        for number in after - before:
            self._naming[number].add(ledger_id)

    # --- Blocks -----------------------------------------------------------------------------------

    def _mzxid(self, ledger_id: int, place: tuple[LedgerBlock, int] | None) -> int:
        """Return -1 for an unknown ledger. ``place``: from ``_find``."""
        if place is not None:
            block, position = place
            return block.mzxids[position]
        return self._unreadable.get(ledger_id, -1)

    def _find(self, ledger_id: int) -> tuple[LedgerBlock, int] | None:
        if self._found is not None and self._found[0] == ledger_id:
            return self._found[1]
        number = bisect_right(self._firsts, ledger_id) - 1
        if number < 0:
            return None
        position = self._blocks[number].find(ledger_id)
        if position is None:
            return None
        place = (self._blocks[number], position)
        self._found = (ledger_id, place)
        return place

    def _insert(self, ledger_id: int, row: Row) -> None:
        self._found = None
        if not self._blocks:
            self._blocks.append(LedgerBlock())
            self._firsts.append(ledger_id)
        number = max(0, bisect_right(self._firsts, ledger_id) - 1)
        block = self._blocks[number]
        block.insert(ledger_id, row)
        self._firsts[number] = block.ids[0]
        if len(block) > BLOCK_MAX:
            halves = block.split()
            self._blocks[number : number + 1] = halves
            self._firsts[number : number + 1] = [half.ids[0] for half in halves]


def used_write_sets(metadata: LedgerMetadata | LedgerOutline) -> WriteSets:
    """Return which write sets of each segment have entries; a short segment does not use all.

    The last segment of a ledger that is not closed may have any number of entries, so all its write
    sets count as used.
    """
    size, is_closed = metadata.ensemble_size, metadata.is_closed
    firsts = [segment.first_entry_id for segment in metadata.segments]
    if not firsts:
        return ()
    end = metadata.last_entry_id + 1 if is_closed else firsts[-1] + size
    if len(firsts) == 1 and end - firsts[0] >= size:  # nearly always
        return ()
    used = tuple(
        (first % size, max(0, min(next_first - first, size)))
        for first, next_first in zip(firsts, [*firsts[1:], end], strict=True)
    )
    return () if all(count == size for _, count in used) else used


def _bookies(row: Row | None) -> set[int]:
    return set() if row is None else set(row.words[1:])


def _between(ids: BitMap64, first: int, stop: int | None) -> Iterator[int]:
    """Yield the ids from ``first`` to before ``stop``; None: to the end."""
    rest = ids.iter_equal_or_larger(first)
    return rest if stop is None else takewhile(lambda ledger_id: ledger_id < stop, rest)


# --- How the map is stored ------------------------------------------------------------------------


class Row(NamedTuple):
    """One ledger. ``words``: the number of its shape, then those of its bookies; all below 2^32."""

    czxid: int
    mzxid: int
    length: int
    words: array[int]


class LedgerBlock:
    """Rows by ledger id, column by column. The words of all rows are in one array."""

    __slots__ = ("_czxids", "_ends", "_lengths", "_words", "ids", "mzxids")

    def __init__(self) -> None:
        self.ids = array("q")
        """Ascending."""
        self._czxids, self.mzxids, self._lengths = array("q"), array("q"), array("q")
        self._words, self._ends = array("I"), array("I")
        """The words of the rows, in order, and the position in ``_words`` after those of each
        row."""

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ledger_id: int) -> int | None:
        """Return the position of the ledger; None if it is not in the block."""
        position = bisect_left(self.ids, ledger_id)
        is_found = position < len(self.ids) and self.ids[position] == ledger_id
        return position if is_found else None

    def row(self, position: int) -> Row:
        return Row(
            self._czxids[position],
            self.mzxids[position],
            self._lengths[position],
            self.words(position),
        )

    def words(self, position: int) -> array[int]:
        return self._words[self._begin(position) : self._ends[position]]

    def insert(self, ledger_id: int, row: Row) -> None:
        """Add a ledger that is not in the block."""
        position = bisect_left(self.ids, ledger_id)
        self.ids.insert(position, ledger_id)
        self._czxids.insert(position, 0)
        self.mzxids.insert(position, 0)
        self._lengths.insert(position, 0)
        self._ends.insert(position, self._begin(position))
        self.replace(position, row)

    def replace(self, position: int, row: Row) -> None:
        self._czxids[position] = row.czxid
        self.mzxids[position] = row.mzxid
        self._lengths[position] = row.length
        self._put_words(position, row.words)

    def delete(self, position: int) -> None:
        self._put_words(position, array("I"))
        for column in (self.ids, self._czxids, self.mzxids, self._lengths, self._ends):
            del column[position]

    def split(self) -> tuple[LedgerBlock, LedgerBlock]:
        middle = len(self) // 2
        return self._part(0, middle), self._part(middle, len(self))

    def _part(self, first: int, stop: int) -> LedgerBlock:
        """Return some of the rows. A slice of an array takes no more memory than it needs."""
        part, begin = LedgerBlock(), self._begin(first)
        part.ids = self.ids[first:stop]
        part._czxids, part.mzxids = self._czxids[first:stop], self.mzxids[first:stop]
        part._lengths = self._lengths[first:stop]
        part._words = self._words[begin : self._begin(stop)]
        part._ends = array("I", [end - begin for end in self._ends[first:stop]])
        return part

    def _begin(self, position: int) -> int:
        return self._ends[position - 1] if position else 0

    def _put_words(self, position: int, words: array[int]) -> None:
        begin, end = self._begin(position), self._ends[position]
        self._words[begin:end] = words
        growth = len(words) - (end - begin)
        if growth:
            self._ends[position:] = array("I", [end + growth for end in self._ends[position:]])


class Numbering(Generic[T]):
    """Numbers values from 0 in the order in which they are first seen, and forgets none."""

    def __init__(self) -> None:
        self.values: list[T] = []
        """By number."""
        self.numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        """Return the value's number; a new one if it has none yet."""
        number = self.numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number
