"""What a bookie is asked and what it answers, in words common to both protocols.

A codec (the modules ``v2`` and ``v3``) turns a request into a packet and a packet into a reply, and
gives both the key by which they find each other. Ids are checked here, before anything is sent:
SortedLedgerStorage accepts a negative entry id and can then neither flush nor restart, and a read
of any negative id but -1 gets no reply at all over V3.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from ledgers.bookie.protocol.status import Status
from ledgers.bookies import LAST_ENTRY, LacAnswer, Room
from ledgers.entry import HEADER_BYTES, EntryHeader

MASTER_KEY_BYTES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One entry, or ``LAST_ENTRY``. With ``fencing_key``, a master key: fence the ledger first."""

    ledger_id: int
    entry_id: int
    fencing_key: bytes | None = None
    is_high_priority: bool = False

    def __post_init__(self) -> None:
        assert self.ledger_id >= 0, self
        assert self.entry_id >= LAST_ENTRY, self
        assert self.fencing_key is None or len(self.fencing_key) == MASTER_KEY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """Consecutive entries, V2 only. The bookie stops at the first that it lacks, or at a limit.

    ``bytes_max`` counts 36 bytes for the reply and 4 for each entry besides its own. The first
    entry is given whatever its size.
    """

    ledger_id: int
    first_entry_id: int
    count_max: int
    bytes_max: int

    def __post_init__(self) -> None:
        assert self.ledger_id >= 0, self
        assert self.first_entry_id >= 0, self  # -1 gives the last entry, then all from 0 on
        assert self.count_max >= 1, self  # 0 would mean "no limit"
        assert self.bytes_max >= 1, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Store an entry; the bookie takes its ids from its bytes."""

    entry: bytes
    master_key: bytes
    is_recovery: bool = False
    """Allowed although the ledger is fenced."""
    is_high_priority: bool = False

    def __post_init__(self) -> None:
        assert len(self.entry) >= HEADER_BYTES
        assert self.header.ledger_id >= 0, self.header
        assert self.header.entry_id >= 0, self.header
        assert len(self.master_key) == MASTER_KEY_BYTES  # V3 would keep any, even an empty one

    @property
    def header(self) -> EntryHeader:
        return EntryHeader.of(self.entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLac:
    """The explicit LAC record and the last entry. V3 only, fences nothing."""

    ledger_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLac:
    """Store an explicit LAC record. V3 only."""

    ledger_id: int
    lac: int
    master_key: bytes
    record: bytes

    def __post_init__(self) -> None:
        assert self.ledger_id >= 0, self.ledger_id
        assert len(self.master_key) == MASTER_KEY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEntries:
    """Which entries the bookie stores. V3 only; DbLedgerStorage never answers."""

    ledger_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRoom:
    """The size of the bookie's disks, and what is free of it. V3 only."""


Request = Read | ReadBatch | Add | ReadLac | WriteLac | ListEntries | ReadRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A bookie's answer. Which of the fields below ``code`` are filled depends on the request."""

    key: Hashable
    status: Status
    code: int
    """``status`` as the number on the wire, for the log: all unknown codes share one status."""
    entries: tuple[bytes, ...] = ()
    """Of a read (exactly one, if its status is good) or a batch read. Not verified."""
    lac: LacAnswer = field(default_factory=LacAnswer)
    """Of READ_LAC; may hold one of the two although the status says EIO for the other."""
    availability: bytes = b""
    """Of a list of entries."""
    room: Room | None = None

    def check(self, **context: object) -> "Reply":
        """This reply if its status is EOK; else raises the one error that the status means."""
        if self.status.error is not None:
            raise self.status.error(
                f"the bookie answered {self.status.name}", code=self.code, **context
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A request ready for a frame, and how its reply will be recognised."""

    key: Hashable
    packet: bytes
    is_key_unique: bool
    """Whether no other request on the connection ever has this key (the rule in V3, the exception
    in V2)."""


class Codec(Protocol):
    """What ``v2`` and ``v3`` are: pure, and without memory of what was sent."""

    def encode(self, request: Request, request_id: int) -> Encoded:
        """``request_id``: unique on the connection, 0 <= id < 2^63. Raises ValueError: not in this
        protocol."""
        ...

    def decode(self, packet: bytes) -> Reply:
        """Raises CorruptionError for anything that is not a well-formed reply."""
        ...
