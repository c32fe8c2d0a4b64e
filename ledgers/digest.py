"""The bytes of an entry as bookies store them, and the digest that protects them.

Layout (big-endian): ledger id, entry id, LAC, length (8 bytes each), digest, payload. The digest
covers the 32 header bytes and the payload. The same bytes serve both protocols and the disk.
Source: BookKeeper's DigestManager; golden vectors in ``tests/vectors/entries.json``.

Fingerprints of entries: numbers by which copies can be compared without keeping them.

A fingerprint covers the payload and the ledger length in the header, which never change for an
entry. LAC and digest are left out, because recovery rewrites entries with the LAC that it knows.
Java's repair does the same.
"""

import hashlib
import hmac
import struct
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import google_crc32c

from ledgers.errors import DigestMismatchError
from ledgers.model import DigestType

HEADER = struct.Struct(">qqqq")
HEADER_BYTES = HEADER.size

if google_crc32c.implementation != "c":  # 1,000 times slower: a repair would take days
    raise ImportError(
        "google-crc32c has only its pure-Python fallback here: install a binary wheel"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryHeader:
    """The header of an entry. ``lac``: as the writer knew it. ``length``: payload bytes of the
    ledger up to and including this entry."""

    ledger_id: int
    entry_id: int
    lac: int
    length: int

    @classmethod
    def of(cls, entry: bytes | memoryview) -> "EntryHeader":
        """Parse the header. Raises DigestMismatchError if the bytes are too short for one."""
        if len(entry) < HEADER_BYTES:
            raise DigestMismatchError("entry is shorter than its header", entry_bytes=len(entry))
        ledger_id, entry_id, lac, length = HEADER.unpack_from(entry)
        return cls(ledger_id=ledger_id, entry_id=entry_id, lac=lac, length=length)


def master_key(password: bytes) -> bytes:
    """Return the 20-byte key that authorizes requests to bookies; the same for all digest types."""
    return hashlib.sha1(b"ledger" + password).digest()


class EntryDigest:
    """Computes and verifies the digests of one ledger. Immutable."""

    __slots__ = ("_compute", "digest_type", "master_key", "size")

    def __init__(self, digest_type: DigestType, password: bytes) -> None:
        self.digest_type = digest_type
        self.master_key = master_key(password)
        self.size, self._compute = _digest(digest_type, password)

    def is_good(self, entry: bytes | memoryview, *, ledger_id: int, entry_id: int) -> bool:
        """True if the bytes are this entry with a valid digest. ``entry_id`` -1 accepts any id."""
        start = HEADER_BYTES + self.size
        if len(entry) < start:
            return False
        found_ledger_id, found_entry_id, _, _ = HEADER.unpack_from(entry)
        return (
            found_ledger_id == ledger_id
            and (found_entry_id == entry_id or entry_id == -1)
            and self._compute(entry[:HEADER_BYTES], entry[start:]) == entry[HEADER_BYTES:start]
        )

    def check(self, entry: bytes, *, ledger_id: int, entry_id: int) -> EntryHeader:
        """Return the header of a valid entry. Raises DigestMismatchError."""
        if not self.is_good(entry, ledger_id=ledger_id, entry_id=entry_id):
            raise DigestMismatchError("digest mismatch", ledger_id=ledger_id, entry_id=entry_id)
        return EntryHeader.of(entry)

    @property
    def overhead_bytes(self) -> int:
        """Return the bytes of a stored entry that are not payload."""
        return HEADER_BYTES + self.size

    def payload(self, entry: bytes) -> bytes:
        return entry[HEADER_BYTES + self.size :]

    def pack(
        self, *, ledger_id: int, entry_id: int, lac: int, length: int, payload: bytes
    ) -> bytes:
        header = HEADER.pack(ledger_id, entry_id, lac, length)
        return b"".join((header, self._compute(header, payload), payload))

    def lac_of_record(self, record: bytes, *, ledger_id: int) -> int:
        """Return the LAC of an explicit LAC record. Raises DigestMismatchError."""
        if len(record) == 16 + self.size and self._compute(record[:16], b"") == record[16:]:
            found_ledger_id, lac = struct.unpack_from(">qq", record)
            if found_ledger_id == ledger_id:
                return int(lac)
        raise DigestMismatchError("bad explicit LAC record", ledger_id=ledger_id)


_Bytes = bytes | memoryview
_Compute = Callable[[_Bytes, _Bytes], bytes]


def _digest(digest_type: DigestType, password: bytes) -> tuple[int, _Compute]:
    """Return the digest's size in bytes, and the function of (header, payload)."""
    match digest_type:
        case DigestType.DUMMY:
            return 0, lambda header, payload: b""
        case DigestType.CRC32:
            return 8, _crc32
        case DigestType.CRC32C:
            return 4, _crc32c
        case DigestType.HMAC:
            keyed = hmac.new(hashlib.sha1(b"mac" + password).digest(), digestmod="sha1")

            def _hmac(header: _Bytes, payload: _Bytes) -> bytes:
                mac = keyed.copy()
                mac.update(header)
                mac.update(payload)
                return mac.digest()

            return 20, _hmac


def _crc32(header: _Bytes, payload: _Bytes) -> bytes:
    return zlib.crc32(payload, zlib.crc32(header)).to_bytes(8, "big")


def _crc32c(header: _Bytes, payload: _Bytes) -> bytes:
    # The C extension accepts only bytes, so a view is copied (costs 10 % at 1 KB).
    crc = google_crc32c.extend(google_crc32c.value(bytes(header)), bytes(payload))
    return int(crc).to_bytes(4, "big")


ID_AND_LENGTH = struct.Struct(">8xq8xq")
"""Entry id and length in the header of an entry."""
NO_FINGERPRINT = 0
_LENGTH_MASK = (1 << 32) - 1
SPAN_MAX = 1 << 20
"""Limit on the number of ids from the first to the last entry of one transfer at one bookie."""


class Fingerprints:
    """One bookie's fingerprints: 8 bytes for each id from the first to the last, read or not."""

    __slots__ = ("first_entry_id", "values")

    def __init__(self, first_entry_id: int, last_entry_id: int) -> None:
        """Start without fingerprints. ``last_entry_id`` is inclusive."""
        span = last_entry_id - first_entry_id + 1
        assert 0 < span <= SPAN_MAX, (first_entry_id, last_entry_id)
        self.first_entry_id = first_entry_id
        self.values = array("Q", bytes(8 * span))

    def of(self, entry_id: int) -> int:
        """Return the fingerprint of an entry; ``NO_FINGERPRINT`` if no good copy was read."""
        position = entry_id - self.first_entry_id
        return self.values[position] if 0 <= position < len(self.values) else NO_FINGERPRINT

    def add(self, entry: bytes, *, digest_bytes: int) -> None:
        """Store the fingerprint of an entry whose digest was verified."""
        entry_id, length = ID_AND_LENGTH.unpack_from(entry)
        payload = entry[HEADER_BYTES + digest_bytes :]
        self.values[entry_id - self.first_entry_id] = fingerprint(payload, length)


def fingerprint(payload: bytes, length: int) -> int:
    """Return 64 bits: the payload's CRC32C and the length. Never ``NO_FINGERPRINT``."""
    return (google_crc32c.value(payload) << 32 | length & _LENGTH_MASK) or 1
