"""The bookies as the rest of the code sees them: what one can be asked, and what it may answer.

``bookie.client`` speaks to real ones, ``memory.bookies`` are for tests and simulation; both pass
``tests/contract/test_bookies.py``. Answers are three-valued throughout (rule S5): present, an
explicit no, or unknown; only ``NoSuchEntryError`` is a no.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct, field

from ledgers.entry import EntryDigest
from ledgers.errors import BookmenderError
from ledgers.fingerprints import Fingerprints
from ledgers.metadata import BookieId

LAST_ENTRY = -1
"""As an entry id in a read: the last entry that the bookie stores of the ledger (spec of V2, V3)."""


class Answer(enum.Enum):
    """What a bookie's reply says of one entry."""

    PRESENT = "present"
    """There, and its digest is good."""
    ABSENT = "absent"
    """Explicitly not there (ENOENTRY, ENOLEDGER)."""
    MISMATCH = "mismatch"
    """There, but not what its digest says: a missing copy on this bookie (rule S7)."""
    UNREADABLE = "unreadable"
    """It cannot be read there (EIO): no "no", but a copy that is to be made elsewhere (rule S15)."""
    UNKNOWN = "unknown"
    """Anything else: an error, a time-out, a broken connection. Proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LacAnswer:
    """Reply to READ_LAC: the last explicit LAC record and the last stored entry, where there."""

    lac_record: bytes | None = None
    last_entry: bytes | None = None


class Transfer(Struct, frozen=True, kw_only=True):
    """Entries of one ledger to be read in bulk, verified, and, given a target, written there.

    ``reads``: ascending entry ids asked of each source; with a target an id is asked of one source
    only. All together are at most ``TRANSFER_ENTRIES_MAX``. Written with the recovery flag, the bytes as read.
    ``checks``: besides, given a target, entries that are asked of each source and verified, but not written;
    others than it reads.
    """

    ledger_id: int
    digest: EntryDigest
    reads: Mapping[BookieId, Sequence[int]]
    checks: Mapping[BookieId, Sequence[int]] = field(default_factory=dict)
    target: BookieId | None = None
    entry_bytes_hint: int = 1024
    """A guess at an entry's size, to keep within the byte window before the first one is seen."""
    has_alternatives: bool = False
    """Whether what a source leaves unanswered may be asked elsewhere: then a short silence of it is
    enough to give its entries up."""
    takes_fingerprints: bool = False
    """Whether the entries of each source are to be compared with other copies of them."""

    def __post_init__(self) -> None:
        assert self.asked_count <= TRANSFER_ENTRIES_MAX, self.ledger_id
        assert not self.checks or (self.target and not self.takes_fingerprints), self.ledger_id

    @property
    def asked_count(self) -> int:
        """Of all entries that are asked of anybody."""
        return sum(map(len, self.reads.values())) + sum(map(len, self.checks.values()))

    def asked_of(self, bookie: BookieId) -> set[int]:
        """Entries that are asked of it, be it to be written or not."""
        return {*self.reads.get(bookie, ()), *self.checks.get(bookie, ())}


TRANSFER_ENTRIES_MAX = 65_536


class TransferResult(Struct, frozen=True, kw_only=True):
    """What became of a Transfer. Entries in neither mapping below are good, and those of reads on the target.

    ``failures``: per source, the entries that it did not give, and why (never PRESENT).
    ``unwritten``: entries read well that the target did not acknowledge, or that were not read any
    more because the target had failed; ``target_error`` is then what it said first.
    """

    entry_count: int = 0
    """Entries read with a good digest and, given a target, acknowledged by it. None of ``checks``."""
    entry_bytes: int = 0
    """Their stored size, headers and digests included."""
    failures: Mapping[BookieId, Mapping[int, Answer]] = field(default_factory=dict)
    unwritten: frozenset[int] = frozenset()
    target_error: BookmenderError | None = None
    silent: frozenset[BookieId] = frozenset()
    """Sources that could not be connected to, or fell silent for as long as one is waited for."""
    fingerprints: Mapping[BookieId, Fingerprints] = field(default_factory=dict)
    """Per source, of the entries that it gave; nothing unless they were wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The disks that a bookie keeps ledgers on, all together. ``0 <= free_bytes <= total_bytes``."""

    free_bytes: int
    total_bytes: int

    def __post_init__(self) -> None:
        assert 0 <= self.free_bytes <= self.total_bytes, self
        assert self.total_bytes > 0, self


class Standing(Struct, frozen=True, kw_only=True):
    """How a bookie does as a source of transfers, as far as this process has seen."""

    is_ailing: bool = False
    """It failed lately, or is silent now: to be asked last."""
    waiting_bytes: int = 0
    """About so much is asked of it, or will be next."""
    reply_s: float = 0.001
    """What a reply took lately."""


class Bookies(Protocol):
    """Requests to bookies, named by id; addresses are the implementation's business.

    Every call may raise UnavailableError (no answer in time, broken connection, unresolvable id,
    EIO and every other code that proves nothing), BusyError, UnauthorizedError. What an entry
    weighs against the limits of rule S10 is accounted inside.
    """

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        """The stored entry, not verified. Raises NoSuchEntryError."""
        ...

    async def read_fencing(
        self,
        bookie: BookieId,
        ledger_id: int,
        entry_id: int,
        *,
        master_key: bytes,
        is_high_priority: bool = False,
    ) -> bytes:
        """As ``read``, after fencing the ledger there. Raises NoSuchEntryError (fenced all the same)."""
        ...

    async def read_lac(self, bookie: BookieId, ledger_id: int) -> LacAnswer:
        """Fences nothing. Raises NoSuchEntryError, also where the bookie merely could not tell."""
        ...

    async def read_batch(
        self,
        bookie: BookieId,
        ledger_id: int,
        first_entry_id: int,
        *,
        count_max: int,
        bytes_max: int,
    ) -> list[bytes]:
        """Consecutive entries from the first on, at least one, fewer where one is missing.

        Falls back to a single read on a bookie without batch reads (before 4.17).
        Raises NoSuchEntryError when the first is missing.
        """
        ...

    async def add(
        self,
        bookie: BookieId,
        entry: bytes,
        *,
        master_key: bytes,
        is_recovery: bool = False,
        is_high_priority: bool = False,
    ) -> None:
        """Store a packed entry (its ids come from its bytes). Raises FencedError, ReadOnlyError."""
        ...

    async def write_lac(
        self, bookie: BookieId, ledger_id: int, lac: int, *, master_key: bytes, record: bytes
    ) -> None:
        """Store an explicit LAC record. Raises FencedError, ReadOnlyError, NoSuchEntryError."""
        ...

    async def list_entries(self, bookie: BookieId, ledger_id: int) -> Sequence[range]:
        """Runs of the entry ids that the bookie stores. Silence (DbLedgerStorage) is UnavailableError.

        Raises NoSuchEntryError when the bookie does not know the ledger.
        """
        ...

    async def room(self, bookie: BookieId) -> Room:
        """How full its disks are (GET_BOOKIE_INFO). Over V3."""
        ...

    async def transfer(self, transfer: Transfer) -> TransferResult:
        """The bulk data path. Never raises for what a bookie did: the result says it."""
        ...

    def standing(self, bookie: BookieId) -> Standing:
        """Asks nothing: what transfers have shown."""
        ...

    async def close(self) -> None: ...
