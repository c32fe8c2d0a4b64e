"""``Bookies`` in memory, for tests and simulations, with faults on request.

``MemoryBookies`` passes the same contract tests as ``client``. Time passes only on the given clock,
so a simulation with its own clock is deterministic.

Each bookie is a plain state machine. Where it matters here, it behaves like real bookies of 4.16 to
4.18. This concerns fences and the requests that they admit, master keys, the meaning of the last
entry, and ledgers deleted by garbage collection. Disks, journals and the differences between
storages are left out, except for a crash that forgets the fence of a ledger without entries.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable
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
from ledgers.digest import EntryDigest, EntryHeader, Fingerprints
from ledgers.errors import (
    BookmenderError,
    FencedError,
    LocalLimitError,
    NoAnswerError,
    NoSuchEntryError,
    ReadOnlyError,
    UnauthorizedError,
    UnavailableError,
    UnreadableError,
)
from ledgers.model import BookieId

T = TypeVar("T")

_GIB = 1 << 30

SILENCE_S = 5.0
"""Timeout of a request without a reply."""


class Op(enum.Enum):
    """The kinds of requests, for the choice of faults."""

    READ = "read"
    READ_FENCING = "read_fencing"
    READ_LAC = "read_lac"
    ADD = "add"
    ROOM = "room"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one request: the request is late, its reply is late, it fails, or several of
    these.

    ``is_executed``: the bookie executes the request before ``error`` is raised, so its reply is
    lost.
    """

    delay_s: float = 0.0
    reply_delay_s: float = 0.0
    error: type[BookmenderError] | None = None
    is_executed: bool = False


NO_FAULT = Fault()

NO_LEDGER = -1
"""The ledger id in a request that concerns no ledger."""

Faults = Callable[[BookieId, Op, int], Fault]
"""Returns the fault of a request to a bookie about a ledger. Called once for each request, so it
may be random."""


def no_faults(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
    return NO_FAULT


class MemoryBookies:
    """The ``Bookies``. ``faults`` may be replaced at any time; ``fail`` takes precedence over
    it."""

    def __init__(self, bookies: Iterable[BookieId], *, clock: Clock) -> None:
        self._clock = clock
        self.faults: Faults = no_faults
        self._bookies = {bookie: MemoryBookie() for bookie in bookies}
        self._failing: dict[tuple[BookieId, Op], Fault] = {}
        self.standings: dict[BookieId, SourceHealth] = {}
        """Results of ``source_health`` that differ from the default."""
        self._is_closed = False

    # --- For tests -----------------------------------------------------------------------------

    def bookie(self, bookie: BookieId) -> MemoryBookie:
        """Return one bookie, to inspect or break it. Creates it for a new id."""
        return self._bookies.setdefault(bookie, MemoryBookie())

    def take_address(self, newcomer: BookieId, *, of: BookieId) -> None:
        """Send later requests for ``of`` to ``newcomer``, which was formatted at the same
        address."""
        self._bookies[of] = self.bookie(newcomer)

    def fail(self, bookie: BookieId, op: Op, fault: Fault) -> None:
        """Apply this fault to every later request of this kind."""
        self._failing[bookie, op] = fault

    def stop_failing(self, bookie: BookieId, op: Op) -> None:
        del self._failing[bookie, op]

    # --- Requests ------------------------------------------------------------------------------

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        read = partial(self._find(bookie).read, ledger_id, entry_id)
        return await self._serve(bookie, Op.READ, ledger_id, read)

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
        read = partial(self._find(bookie).read_lac, ledger_id)
        return await self._serve(bookie, Op.READ_LAC, ledger_id, read)

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

    async def room(self, bookie: BookieId) -> DiskSpace:
        return await self._serve(bookie, Op.ROOM, NO_LEDGER, lambda: self._find(bookie).room)

    async def close(self) -> None:
        self._is_closed = True

    async def _serve(self, bookie: BookieId, op: Op, ledger_id: int, execute: Callable[[], T]) -> T:
        """Serve a request. It takes at least one step of the loop each way, like a real one."""
        fault = self._failing.get((bookie, op)) or self.faults(bookie, op, ledger_id)
        await self._clock.sleep(fault.delay_s)
        if fault.error is not None and not fault.is_executed:
            raise fault.error("a fault of the test", bookie=bookie, ledger_id=ledger_id)
        self._check_up(bookie)
        result = execute()
        await self._clock.sleep(fault.reply_delay_s)
        self._check_up(bookie)
        if fault.error is not None:
            raise fault.error("a fault of the test", bookie=bookie, ledger_id=ledger_id)
        return result

    def _find(self, bookie: BookieId) -> MemoryBookie:
        if self._is_closed:
            raise UnavailableError("closed by us", bookie=bookie)
        if bookie not in self._bookies:
            raise UnavailableError("the address of this bookie is unknown", bookie=bookie)
        return self._bookies[bookie]

    def _check_up(self, bookie: BookieId) -> None:
        if self._find(bookie).is_down:
            raise NoAnswerError("the bookie is down", bookie=bookie)

    # --- Transfers -----------------------------------------------------------------------------

    def source_health(self, bookie: BookieId) -> SourceHealth:
        return self.standings.get(bookie, SourceHealth())

    async def transfer(self, transfer: Transfer) -> TransferResult:
        """Run the transfer, one entry after the other."""
        failures: dict[BookieId, dict[int, Answer]] = {}
        unwritten: set[int] = set()
        unresponsive: set[BookieId] = set()
        not_asked: set[BookieId] = set()
        target_error: BookmenderError | None = None
        entry_count = entry_bytes = 0
        fingerprints = _fingerprints_of(transfer)
        for source, entry_ids in transfer.reads.items():
            for entry_id in entry_ids:
                if target_error is not None:
                    unwritten.add(entry_id)
                    continue
                entry = await self._read_verified(
                    transfer, source, entry_id, unresponsive, not_asked
                )
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
                entry = await self._read_verified(
                    transfer, source, entry_id, unresponsive, not_asked
                )
                if isinstance(entry, Answer):
                    failures.setdefault(source, {})[entry_id] = entry
        return TransferResult(
            entry_count=entry_count,
            entry_bytes=entry_bytes,
            failures=failures,
            unwritten=frozenset(unwritten),
            target_error=target_error,
            unresponsive=frozenset(unresponsive),
            not_asked=frozenset(not_asked),
            fingerprints=fingerprints,
        )

    async def _read_verified(
        self,
        transfer: Transfer,
        source: BookieId,
        entry_id: int,
        unresponsive: set[BookieId],
        not_asked: set[BookieId],
    ) -> bytes | Answer:
        """Return the entry, or why there is none. Adds a source that does not answer to
        ``unresponsive``, and one that this process could not ask to ``not_asked``."""
        ledger_id = transfer.ledger_id
        try:
            entry = await self.read(source, ledger_id, entry_id)
        except NoSuchEntryError:
            return Answer.ABSENT
        except UnreadableError:
            return Answer.UNREADABLE
        except NoAnswerError:
            unresponsive.add(source)
            return Answer.UNKNOWN
        except LocalLimitError:
            not_asked.add(source)
            return Answer.UNKNOWN
        except BookmenderError:
            return Answer.UNKNOWN
        is_good = transfer.digest.is_good(entry, ledger_id=ledger_id, entry_id=entry_id)
        return entry if is_good else Answer.MISMATCH

    async def _write(self, transfer: Transfer, entry: bytes) -> BookmenderError | None:
        """Write the entry to the target, if there is one. Returns the error of the target."""
        if transfer.target is None:
            return None
        master_key = transfer.digest.master_key
        try:
            await self.add(transfer.target, entry, master_key=master_key, is_recovery=True)
        except BookmenderError as error:
            return error
        return None


def _fingerprints_of(transfer: Transfer) -> dict[BookieId, Fingerprints]:
    """Return fingerprints for each source, without values yet."""
    if not transfer.takes_fingerprints:
        return {}
    return {b: Fingerprints(ids[0], ids[-1]) for b, ids in transfer.reads.items() if ids}


@dataclass(slots=True, kw_only=True)
class _Ledger:
    """The data of one ledger on this bookie."""

    master_key: bytes
    is_fenced: bool = False
    is_open: bool = True
    """True if it was written or fenced since the bookie started."""
    lac_record: bytes | None = None
    entries: dict[int, bytes] = field(default_factory=dict)
    unflushed: set[int] = field(default_factory=set)


def lac_record(digest: EntryDigest, *, ledger_id: int, lac: int) -> bytes:
    """Return an explicit LAC record: 16 bytes, followed by their digest."""
    body = struct.pack(">qq", ledger_id, lac)
    return body + digest._compute(body, b"")


class MemoryBookie:
    """The state of one bookie. First the requests that clients send, then the methods for tests.

    ``is_down``: the bookie does not answer. ``is_read_only``: it accepts only high-priority adds.
    """

    def __init__(self) -> None:
        self.is_down = False
        self.is_read_only = False
        self.is_in_limbo = False
        """State after an unclean shutdown without journal: reads get EUNKNOWNLEDGERSTATE instead of
        "no"."""
        self.room = DiskSpace(free_bytes=900 * _GIB, total_bytes=1000 * _GIB)
        """The reported disk space. Stored entries do not change it."""
        self._ledgers: dict[int, _Ledger] = {}
        self._collected: set[int] = set()
        self._index_deletions: set[int] = set()
        self.dropped: set[int] = set()
        """Ledgers of which the bookie lost acknowledged entries."""

    # --- Requests ------------------------------------------------------------------------------

    def read(self, ledger_id: int, entry_id: int) -> bytes:
        ledger = self._ledgers.get(ledger_id)
        if ledger is not None and entry_id == LAST_ENTRY and ledger.entries:
            # The greatest id in the write cache; if the cache has none, the greatest id of all.
            return ledger.entries[max(ledger.unflushed or ledger.entries)]
        if ledger is not None and entry_id in ledger.entries:
            return ledger.entries[entry_id]
        if self.is_in_limbo:
            raise UnavailableError("ledger in limbo", ledger_id=ledger_id)
        raise NoSuchEntryError("no such entry", ledger_id=ledger_id, entry_id=entry_id)

    def read_fencing(self, ledger_id: int, entry_id: int, *, master_key: bytes) -> bytes:
        """Fence, then read. Fences even if the read fails. An unknown ledger is created with this
        key."""
        if ledger_id not in self._collected:
            self._ledger(ledger_id, master_key).is_fenced = True
        return self.read(ledger_id, entry_id)

    def read_lac(self, ledger_id: int) -> LacAnswer:
        """Read the LAC. Answers "no" also in limbo."""
        ledger = self._ledgers.get(ledger_id)
        if ledger is None or not (ledger.entries or ledger.lac_record):
            raise NoSuchEntryError("neither LAC nor entry", ledger_id=ledger_id)
        last_entry = self.read(ledger_id, LAST_ENTRY) if ledger.entries else None
        return LacAnswer(lac_record=ledger.lac_record, last_entry=last_entry)

    def add(
        self, entry: bytes, *, master_key: bytes, is_recovery: bool, is_high_priority: bool
    ) -> None:
        """Store an entry. Replaces an entry with the same id."""
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
        """Store an explicit LAC, also in a fenced ledger."""
        if self.is_read_only:
            raise ReadOnlyError("read-only", ledger_id=ledger_id)
        if ledger_id in self._collected:
            raise NoSuchEntryError("deleted here", ledger_id=ledger_id)
        self._ledger(ledger_id, master_key).lac_record = record

    # --- For tests -----------------------------------------------------------------------------

    def entry_ids(self, ledger_id: int) -> frozenset[int]:
        """Return the ids of the stored entries."""
        ledger = self._ledgers.get(ledger_id)
        return frozenset(ledger.entries) if ledger else frozenset()

    def lose(self, ledger_id: int, entry_id: int) -> None:
        """Lose an entry silently."""
        ledger = self._ledgers[ledger_id]
        del ledger.entries[entry_id]
        ledger.unflushed.discard(entry_id)

    def corrupt(self, ledger_id: int, entry_id: int) -> None:
        """Flip the last bit of an entry: in its payload, or in its digest if the payload is
        empty."""
        entry = self._ledgers[ledger_id].entries[entry_id]
        self._ledgers[ledger_id].entries[entry_id] = entry[:-1] + bytes([entry[-1] ^ 1])

    def flush(self) -> None:
        """Write the cache to disk, which changes the last entry."""
        for ledger_id in self._index_deletions:
            if self._ledgers.pop(ledger_id, None) is not None:
                self.dropped.add(ledger_id)
        self._index_deletions.clear()
        for ledger in self._ledgers.values():
            ledger.unflushed.clear()

    def collect(self, ledger_id: int) -> None:
        """Delete the ledger, as garbage collection does. If it was in use, later adds are
        refused."""
        ledger = self._ledgers.pop(ledger_id, None)
        if ledger is not None and ledger.is_open:
            self._collected.add(ledger_id)

    def collect_late(self, ledger_id: int) -> None:
        """Delete an unused ledger as DbLedgerStorage does: the next flush deletes the index of all
        its entries, including entries that are added before it."""
        self._ledgers.pop(ledger_id, None)
        self._index_deletions.add(ledger_id)

    def crash(self) -> None:
        """Stop. Forgets every ledger without entries, with its key and its fence."""
        self.is_down = True
        self._ledgers = {id_: ledger for id_, ledger in self._ledgers.items() if ledger.entries}
        self._collected.clear()
        for ledger in self._ledgers.values():
            ledger.is_open = False

    def start(self) -> None:
        self.is_down = False

    def wipe(self) -> None:
        """Lose everything, as with new disks."""
        self._ledgers.clear()
        self._collected.clear()

    def _ledger(self, ledger_id: int, master_key: bytes) -> _Ledger:
        """Return the ledger, to be written or fenced. Creates an unknown one with this key."""
        ledger = self._ledgers.setdefault(ledger_id, _Ledger(master_key=master_key))
        if ledger.master_key != master_key:
            raise UnauthorizedError("not the ledger's master key", ledger_id=ledger_id)
        ledger.is_open = True
        return ledger
