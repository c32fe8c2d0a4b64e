"""The interface of bookies: the requests, and the possible answers.

``client`` implements ``Bookies`` for real bookies, ``tests/memory`` for tests and simulation.
Both pass ``tests/contract/test_bookies.py``. Answers are three-valued (rule S5): present, an
explicit "no", or unknown. Only ``NoSuchEntryError`` is a "no".
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct, field

from ledgers.digest import EntryDigest, Fingerprints
from ledgers.errors import BookmenderError
from ledgers.model import BookieId

LAST_ENTRY = -1
"""Entry id in a read request: the last entry that the bookie stores of the ledger (V2 and V3)."""


class Answer(enum.Enum):
    """The outcome of reading one entry from one bookie."""

    PRESENT = "present"
    """The bookie returned the entry, and its digest matches."""
    ABSENT = "absent"
    """The bookie does not store the entry (ENOENTRY, ENOLEDGER)."""
    MISMATCH = "mismatch"
    """The digest does not match. Counts as a missing copy on this bookie (rule S7)."""
    UNREADABLE = "unreadable"
    """The bookie cannot read the entry (EIO). Not a "no", but the copy is replaced (rule S15)."""
    UNKNOWN = "unknown"
    """Any other error, a timeout, or a broken connection. Proves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LacAnswer:
    """Reply to READ_LAC: the last explicit LAC record and the last stored entry, if they exist."""

    lac_record: bytes | None = None
    last_entry: bytes | None = None


class Transfer(Struct, frozen=True, kw_only=True):
    """Entries of one ledger to read in bulk, to verify and, if a target is given, to write to it.

    ``reads``: ascending entry ids by source. With a target, each entry is read from one source
    only. The bytes are written as they were read, with the recovery flag. ``checks``: further entry
    ids by source that are verified but not written; only with a target, and disjoint from
    ``reads``. At most ``TRANSFER_ENTRIES_MAX`` entries in all.
    """

    ledger_id: int
    digest: EntryDigest
    reads: Mapping[BookieId, Sequence[int]]
    checks: Mapping[BookieId, Sequence[int]] = field(default_factory=dict)
    target: BookieId | None = None
    entry_bytes_hint: int = 1024
    """Assumed size of an entry until the first one is read, for the limits in bytes."""
    has_alternatives: bool = False
    """True if other sources have the entries, so that a short silence suffices to give them up."""
    takes_fingerprints: bool = False
    """True if the result needs fingerprints, for a comparison with other copies."""

    def __post_init__(self) -> None:
        assert self.asked_count <= TRANSFER_ENTRIES_MAX, self.ledger_id
        assert not self.checks or (self.target and not self.takes_fingerprints), self.ledger_id

    @property
    def asked_count(self) -> int:
        """The number of entries in ``reads`` and ``checks``."""
        return sum(map(len, self.reads.values())) + sum(map(len, self.checks.values()))

    def asked_of(self, bookie: BookieId) -> set[int]:
        """Return all entry ids that are read from this bookie."""
        return {*self.reads.get(bookie, ()), *self.checks.get(bookie, ())}


TRANSFER_ENTRIES_MAX = 65_536


class TransferResult(Struct, frozen=True, kw_only=True):
    """The outcome of a Transfer.

    ``failures``: by source, the entries without a good copy there, and why (never PRESENT).
    ``unwritten``: good entries that the target did not acknowledge, and entries that were no longer
    read because the target had failed; ``target_error`` is the first error of the target. All other
    entries are good, and those of ``reads`` are on the target.
    """

    entry_count: int = 0
    """Number of good entries of ``reads`` that the target, if there is one, acknowledged."""
    entry_bytes: int = 0
    """Stored size of these entries, including headers and digests."""
    failures: Mapping[BookieId, Mapping[int, Answer]] = field(default_factory=dict)
    unwritten: frozenset[int] = frozenset()
    target_error: BookmenderError | None = None
    unresponsive: frozenset[BookieId] = frozenset()
    """Sources that could not be connected or did not reply in time."""
    not_asked: frozenset[BookieId] = frozenset()
    """Bookies that were not asked, because this process can open no further file or thread."""
    fingerprints: Mapping[BookieId, Fingerprints] = field(default_factory=dict)
    """By source, the fingerprints of its entries; empty unless ``takes_fingerprints``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """Disk space of a bookie's ledger directories together. ``0 <= free_bytes <= total_bytes``."""

    free_bytes: int
    total_bytes: int

    def __post_init__(self) -> None:
        assert 0 <= self.free_bytes <= self.total_bytes, self
        assert self.total_bytes > 0, self


class SourceHealth(Struct, frozen=True, kw_only=True):
    """The health of a bookie as a source of transfers, as observed by this process."""

    is_unhealthy: bool = False
    """The bookie failed recently or does not reply now. Other sources are preferred."""
    waiting_bytes: int = 0
    """Estimated size of the entries that are requested from it or will be next."""
    reply_s: float = 0.001
    """Recent reply time in seconds."""


class Bookies(Protocol):
    """Requests to bookies, which are named by id, within the limits of rule S10. Every call may
    raise UnavailableError (also for every code that proves nothing), BusyError,
    UnauthorizedError."""

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        """Return the stored entry without verifying it. Raises NoSuchEntryError."""

    async def read_fencing(
        self,
        bookie: BookieId,
        ledger_id: int,
        entry_id: int,
        *,
        master_key: bytes,
        is_high_priority: bool = False,
    ) -> bytes:
        """Fence the ledger, then read. Raises NoSuchEntryError, with the ledger fenced."""

    async def read_lac(self, bookie: BookieId, ledger_id: int) -> LacAnswer:
        """Read the LAC without fencing. NoSuchEntryError may also mean that it is unknown."""

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

    async def room(self, bookie: BookieId) -> DiskSpace:
        """Return the disk space of the bookie (GET_BOOKIE_INFO, over V3)."""

    async def transfer(self, transfer: Transfer) -> TransferResult:
        """Run a bulk transfer. Errors of bookies are part of the result and never raised."""

    def source_health(self, bookie: BookieId) -> SourceHealth:
        """Return the health of the bookie as a source. Sends no request."""

    async def close(self) -> None: ...
