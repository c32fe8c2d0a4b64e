"""``Bookies`` in memory, for tests and simulations, with faults on request.

``MemoryBookies`` passes the same contract tests as ``client``. Time passes only on the given clock, so a
simulation with its own clock is deterministic.

Each bookie is a plain state machine. It behaves as bookies of 4.16 to 4.18 were seen to behave where
this matters here: fences and the requests that they admit, master keys, the meaning of the last entry,
ledgers deleted by garbage collection. Disks, journals and the differences between storages are left
out, except for a crash that forgets the fence of a ledger without entries.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ledgers.bookies import (
    LAST_ENTRY,
    Answer,
    DiskSpace,
    LacAnswer,
    SourceHealth,
    Transfer,
    TransferResult,
)
from ledgers.clock import Clock
from ledgers.digest import EntryHeader, Fingerprints
from ledgers.errors import (
    BookmenderError,
    FencedError,
    NoAnswerError,
    NoSuchEntryError,
    ReadOnlyError,
    UnauthorizedError,
    UnavailableError,
    UnreadableError,
)
from ledgers.model import BookieId

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
        self.room = DiskSpace(free_bytes=900 * _GIB, total_bytes=1000 * _GIB)
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


T = TypeVar("T")

SILENCE_S = 5.0
"""How long a request without an answer is waited for."""


class Op(enum.Enum):
    """The requests, for faults to choose from."""

    READ = "read"
    READ_FENCING = "read_fencing"
    READ_LAC = "read_lac"
    READ_BATCH = "read_batch"
    ADD = "add"
    WRITE_LAC = "write_lac"
    LIST_ENTRIES = "list_entries"
    ROOM = "room"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What befalls a request: it is late, its reply is late, it fails; all of these at once if need
    be.

    With ``is_executed`` the bookie did what was asked before ``error`` is raised: the reply is
    lost.
    """

    delay_s: float = 0.0
    reply_delay_s: float = 0.0
    error: type[BookmenderError] | None = None
    is_executed: bool = False


NO_FAULT = Fault()

NO_LEDGER = -1
"""Instead of an id, in a request about the bookie itself."""

Faults = Callable[[BookieId, Op, int], Fault]
"""The fault of a request to a bookie about a ledger; asked once for each, so it may draw at
random."""


def no_faults(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
    return NO_FAULT


class MemoryBookies:
    """See the module. ``faults`` may be replaced at any time; ``fail`` comes before it."""

    def __init__(self, bookies: Iterable[BookieId], *, clock: Clock) -> None:
        self._clock = clock
        self.faults: Faults = no_faults
        self._bookies = {bookie: MemoryBookie() for bookie in bookies}
        self._failing: dict[tuple[BookieId, Op], Fault] = {}
        self.standings: dict[BookieId, SourceHealth] = {}
        """What ``source_health`` says, where it is not the usual."""
        self._is_closed = False

    # --- What a test does ----------------------------------------------------------------------

    def bookie(self, bookie: BookieId) -> MemoryBookie:
        """One bookie, to look into it or to break it; a new one for a new id."""
        return self._bookies.setdefault(bookie, MemoryBookie())

    def take_address(self, newcomer: BookieId, *, of: BookieId) -> None:
        """From now on, requests to ``of`` reach ``newcomer``, which was set up at the same
        address."""
        self._bookies[of] = self.bookie(newcomer)

    def fail(self, bookie: BookieId, op: Op, fault: Fault) -> None:
        """From now on, every such request."""
        self._failing[bookie, op] = fault

    def stop_failing(self, bookie: BookieId, op: Op) -> None:
        del self._failing[bookie, op]

    # --- Requests ------------------------------------------------------------------------------

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        target = self._find(bookie)
        return await self._serve(
            bookie, Op.READ, ledger_id, partial(target.read, ledger_id, entry_id)
        )

    async def read_fencing(
        self,
        bookie: BookieId,
        ledger_id: int,
        entry_id: int,
        *,
        master_key: bytes,
        is_high_priority: bool = False,
    ) -> bytes:
        read = partial(self._find(bookie).read_fencing, ledger_id, entry_id, master_key=master_key)
        return await self._serve(bookie, Op.READ_FENCING, ledger_id, read)

    async def read_lac(self, bookie: BookieId, ledger_id: int) -> LacAnswer:
        target = self._find(bookie)
        return await self._serve(
            bookie, Op.READ_LAC, ledger_id, partial(target.read_lac, ledger_id)
        )

    async def read_batch(
        self,
        bookie: BookieId,
        ledger_id: int,
        first_entry_id: int,
        *,
        count_max: int,
        bytes_max: int,
    ) -> list[bytes]:
        read = partial(
            self._find(bookie).read_batch,
            ledger_id,
            first_entry_id,
            count_max=count_max,
            bytes_max=bytes_max,
        )
        return await self._serve(bookie, Op.READ_BATCH, ledger_id, read)

    async def add(
        self,
        bookie: BookieId,
        entry: bytes,
        *,
        master_key: bytes,
        is_recovery: bool = False,
        is_high_priority: bool = False,
    ) -> None:
        add = partial(
            self._find(bookie).add,
            entry,
            master_key=master_key,
            is_recovery=is_recovery,
            is_high_priority=is_high_priority,
        )
        await self._serve(bookie, Op.ADD, EntryHeader.of(entry).ledger_id, add)

    async def write_lac(
        self, bookie: BookieId, ledger_id: int, lac: int, *, master_key: bytes, record: bytes
    ) -> None:
        write = partial(
            self._find(bookie).write_lac, ledger_id, master_key=master_key, record=record
        )
        await self._serve(bookie, Op.WRITE_LAC, ledger_id, write)

    async def list_entries(self, bookie: BookieId, ledger_id: int) -> Sequence[range]:
        runs = await self._serve(
            bookie,
            Op.LIST_ENTRIES,
            ledger_id,
            partial(self._find(bookie).list_entries, ledger_id),
        )
        if not self._find(bookie).lists_entries:
            await self._clock.sleep(SILENCE_S)
            raise UnavailableError("no answer in time", bookie=bookie)
        return runs

    async def room(self, bookie: BookieId) -> DiskSpace:
        return await self._serve(bookie, Op.ROOM, NO_LEDGER, lambda: self._find(bookie).room)

    async def close(self) -> None:
        self._is_closed = True

    async def _serve(self, bookie: BookieId, op: Op, ledger_id: int, execute: Callable[[], T]) -> T:
        """Every request takes at least one step of the loop each way, as a real one would."""
        fault = self._failing.get((bookie, op)) or self.faults(bookie, op, ledger_id)
        await self._clock.sleep(fault.delay_s)
        if fault.error is not None and not fault.is_executed:
            raise fault.error("as told to", bookie=bookie, ledger_id=ledger_id)
        self._check_up(bookie)
        result = execute()
        await self._clock.sleep(fault.reply_delay_s)
        self._check_up(bookie)
        if fault.error is not None:
            raise fault.error("as told to", bookie=bookie, ledger_id=ledger_id)
        return result

    def _find(self, bookie: BookieId) -> MemoryBookie:
        if self._is_closed:
            raise UnavailableError("closed by us", bookie=bookie)
        if bookie not in self._bookies:
            raise UnavailableError("nobody knows this bookie's address", bookie=bookie)
        return self._bookies[bookie]

    def _check_up(self, bookie: BookieId) -> None:
        if self._find(bookie).is_down:
            raise NoAnswerError("the bookie is down", bookie=bookie)

    # --- Transfers -----------------------------------------------------------------------------

    def source_health(self, bookie: BookieId) -> SourceHealth:
        return self.standings.get(bookie, SourceHealth())

    async def transfer(self, transfer: Transfer) -> TransferResult:
        """One entry after the other."""
        failures: dict[BookieId, dict[int, Answer]] = {}
        unwritten: set[int] = set()
        silent: set[BookieId] = set()
        target_error: BookmenderError | None = None
        entry_count = entry_bytes = 0
        fingerprints = _fingerprints_of(transfer)
        for source, entry_ids in transfer.reads.items():
            for entry_id in entry_ids:
                if target_error is not None:
                    unwritten.add(entry_id)
                    continue
                entry = await self._read_verified(transfer, source, entry_id, silent)
                if isinstance(entry, Answer):
                    failures.setdefault(source, {})[entry_id] = entry
                    continue
                target_error = await self._write(transfer, entry)
                if target_error is not None:
                    unwritten.add(entry_id)
                    continue
                entry_count += 1
                entry_bytes += len(entry)
                if transfer.takes_fingerprints:
                    fingerprints[source].add(entry, digest_bytes=transfer.digest.size)
        for source, entry_ids in transfer.checks.items():
            for entry_id in entry_ids:
                entry = await self._read_verified(transfer, source, entry_id, silent)
                if isinstance(entry, Answer):
                    failures.setdefault(source, {})[entry_id] = entry
        return TransferResult(
            entry_count=entry_count,
            entry_bytes=entry_bytes,
            failures=failures,
            unwritten=frozenset(unwritten),
            target_error=target_error,
            unresponsive=frozenset(silent),
            fingerprints=fingerprints,
        )

    async def _read_verified(
        self, transfer: Transfer, source: BookieId, entry_id: int, silent: set[BookieId]
    ) -> bytes | Answer:
        """The entry, or why there is none. A source that does not answer is put among the
        ``silent``."""
        ledger_id = transfer.ledger_id
        try:
            entry = await self.read(source, ledger_id, entry_id)
        except NoSuchEntryError:
            return Answer.ABSENT
        except UnreadableError:
            return Answer.UNREADABLE
        except NoAnswerError:
            silent.add(source)
            return Answer.UNKNOWN
        except BookmenderError:
            return Answer.UNKNOWN
        is_good = transfer.digest.is_good(entry, ledger_id=ledger_id, entry_id=entry_id)
        return entry if is_good else Answer.MISMATCH

    async def _write(self, transfer: Transfer, entry: bytes) -> BookmenderError | None:
        """Nothing to do without a target."""
        if transfer.target is None:
            return None
        master_key = transfer.digest.master_key
        try:
            await self.add(transfer.target, entry, master_key=master_key, is_recovery=True)
        except BookmenderError as error:
            return error
        return None


def _fingerprints_of(transfer: Transfer) -> dict[BookieId, Fingerprints]:
    """Of nothing yet, for each source."""
    if not transfer.takes_fingerprints:
        return {}
    return {b: Fingerprints(ids[0], ids[-1]) for b, ids in transfer.reads.items() if ids}
