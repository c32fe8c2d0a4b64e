"""Requests and replies of bookies, in terms that both protocols share.

A codec (the modules ``v2`` and ``v3``) converts a request to a packet and a packet to a reply, and
gives both the key by which they are matched. Ids are checked here, before anything is sent:
SortedLedgerStorage accepts a negative entry id, and can then neither flush nor restart; and a read
of a negative id other than -1 gets no reply over V3.

``Status`` is the one table of the bookies' status codes and of the error that each becomes. The
table follows what a caller may conclude (rule S5). Only ENOLEDGER and ENOENTRY prove that an entry
is not there. Codes that prove nothing become ``UnavailableError``: disk errors, a ledger in limbo
after an unclean shutdown, a failed request, unknown codes. Source: BookieProtocol (V2) and
BookkeeperProtocol.StatusCode (V3).
"""

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol

from ledgers.bookies import LAST_ENTRY, DiskSpace, LacAnswer
from ledgers.digest import HEADER_BYTES, EntryHeader
from ledgers.errors import (
    BookmenderError,
    BusyError,
    FencedError,
    NoSuchEntryError,
    ReadOnlyError,
    UnauthorizedError,
    UnavailableError,
    UnreadableError,
)


class Status(enum.Enum):
    """A status of a reply: V2 code, V3 code, and error. ``UNKNOWN`` has no code."""

    EOK = (0, 0, None)
    ENOLEDGER = (1, 402, NoSuchEntryError)
    ENOENTRY = (2, 403, NoSuchEntryError)
    EBADREQ = (100, 404, UnavailableError)  # also after an unexpected exception in the bookie
    EIO = (101, 501, UnreadableError)
    EUA = (102, 502, UnauthorizedError)
    EBADVERSION = (103, 503, UnavailableError)
    EFENCED = (104, 504, FencedError)
    EREADONLY = (105, 505, ReadOnlyError)
    ETOOMANYREQUESTS = (106, 506, BusyError)
    EUNKNOWNLEDGERSTATE = (107, 507, UnavailableError)
    UNKNOWN = (None, None, UnavailableError)

    def __init__(
        self, v2_code: int | None, v3_code: int | None, error: type[BookmenderError] | None
    ) -> None:
        self.v2_code = v2_code
        self.v3_code = v3_code
        self.error = error

    @classmethod
    def of_v2(cls, code: int) -> "Status":
        return _BY_V2_CODE.get(code, cls.UNKNOWN)

    @classmethod
    def of_v3(cls, code: int) -> "Status":
        return _BY_V3_CODE.get(code, cls.UNKNOWN)


_BY_V2_CODE: Final = {status.v2_code: status for status in Status if status.v2_code is not None}
_BY_V3_CODE: Final = {status.v3_code: status for status in Status if status.v3_code is not None}


MASTER_KEY_BYTES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Read one entry, or ``LAST_ENTRY``. ``fencing_key``: the master key; fence first."""

    ledger_id: int
    entry_id: int
    fencing_key: bytes | None = field(default=None, repr=False)
    is_high_priority: bool = False

    def __post_init__(self) -> None:
        assert self.ledger_id >= 0, self
        assert self.entry_id >= LAST_ENTRY, self
        assert self.fencing_key is None or len(self.fencing_key) == MASTER_KEY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Store an entry. The bookie reads its ids from its bytes."""

    entry: bytes
    master_key: bytes = field(repr=False)
    is_recovery: bool = False
    """True: the bookie accepts the entry even if the ledger is fenced."""
    is_high_priority: bool = False

    def __post_init__(self) -> None:
        assert len(self.entry) >= HEADER_BYTES
        assert self.header.ledger_id >= 0, self.header
        assert self.header.entry_id >= 0, self.header
        assert len(self.master_key) == MASTER_KEY_BYTES  # V3 would store any key, even an empty one

    @property
    def header(self) -> EntryHeader:
        return EntryHeader.of(self.entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLac:
    """Read the explicit LAC record and the last entry. V3 only. Does not fence."""

    ledger_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDiskSpace:
    """Read the total and the free size of the bookie's disks. V3 only."""


Request = Read | Add | ReadLac | ReadDiskSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply of a bookie. The request decides which of the fields below ``code`` are set."""

    key: Hashable
    status: Status
    code: int
    """The code in the packet, for the log, because all unknown codes have one ``status``."""
    entry: bytes = b""
    """The entry of a read whose status is EOK. Not verified."""
    lac: LacAnswer = field(default_factory=LacAnswer)
    """The reply to READ_LAC. One field may be set although the status is an error."""
    room: DiskSpace | None = None

    def check(self, **context: object) -> "Reply":
        """Return this reply if its status is EOK. Otherwise raises the error of the status."""
        if self.status.error is not None:
            raise self.status.error(
                f"the bookie answered {self.status.name}", code=self.code, **context
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An encoded request, and the key by which its reply is recognised."""

    key: Hashable
    packet: bytes
    is_key_unique: bool
    """True if no other request on the connection has this key: always in V3, never in V2."""


class Codec(Protocol):
    """The interface of ``v2`` and ``v3``. Pure functions, without memory of earlier requests."""

    def encode(self, request: Request, request_id: int) -> Encoded:
        """Encode a request. ``request_id``: unique, 0 <= id < 2^63. Raises ValueError: unknown."""

    def decode(self, packet: bytes) -> Reply:
        """Decode a reply. Raises CorruptionError if it is malformed."""
