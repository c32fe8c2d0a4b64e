"""Fingerprints of entries: numbers by which copies can be compared without keeping them.

A fingerprint covers the payload and the ledger length in the header, which never change for an
entry. LAC and digest are left out, because recovery rewrites entries with the LAC that it knows.
Java's repair does the same.
"""

import struct
from array import array

import google_crc32c

from ledgers.entry import HEADER_BYTES

ID_AND_LENGTH = struct.Struct(">8xq8xq")
"""Entry id and length in the header of an entry."""
NO_FINGERPRINT = 0
_LENGTH_MASK = (1 << 32) - 1
SPAN_MAX = 1 << 20
"""Limit on the number of ids from the first to the last entry of one transfer at one bookie."""


class Fingerprints:
    """The fingerprints of one bookie's copies: 8 bytes for every id from the first to the last,
    even for ids that were not read."""

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
