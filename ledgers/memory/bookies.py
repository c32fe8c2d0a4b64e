"""``Bookies`` without bookies: for tests and simulations, with faults on request.

Passes the same contract tests as ``bookie.client``. Time passes on the clock given, nowhere else,
so that a simulation that brings its own is deterministic. What a bookie does is in ``bookie``; here
is how requests get there, or do not.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ledgers.bookies import Answer, LacAnswer, Room, Standing, Transfer, TransferResult
from ledgers.clock import Clock
from ledgers.entry import EntryHeader
from ledgers.errors import (
    BookmenderError,
    NoAnswerError,
    NoSuchEntryError,
    UnavailableError,
    UnreadableError,
)
from ledgers.fingerprints import Fingerprints
from ledgers.memory.bookie import MemoryBookie
from ledgers.metadata import BookieId

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
        self.standings: dict[BookieId, Standing] = {}
        """What ``standing`` says, where it is not the usual."""
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

    async def room(self, bookie: BookieId) -> Room:
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

    def standing(self, bookie: BookieId) -> Standing:
        return self.standings.get(bookie, Standing())

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
            silent=frozenset(silent),
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
