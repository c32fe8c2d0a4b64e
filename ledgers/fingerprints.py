"""What an entry holds, in a number: so that copies of it can be compared without being kept.

A fingerprint is made of the payload and of the ledger's length, which an entry has for good. LAC
and digest do not count: a recovery writes entries again with the LAC it knows, and so does Java's
repair.
"""

import struct
from array import array

import google_crc32c

from ledgers.entry import HEADER_BYTES

ID_AND_LENGTH = struct.Struct(">8xq8xq")
"""Of an entry's header."""
NO_FINGERPRINT = 0
_LENGTH_MASK = (1 << 32) - 1
SPAN_MAX = 1 << 20
"""Ids between the first and the last of one transfer's entries at one bookie."""


class Fingerprints:
    """Of one bookie's copies: 8 bytes for every id from the first to the last, whether it was read
    or not."""

    __slots__ = ("first_entry_id", "values")

    def __init__(self, first_entry_id: int, last_entry_id: int) -> None:
        """Of no entry yet. ``last_entry_id`` counts in."""
        span = last_entry_id - first_entry_id + 1
        assert 0 < span <= SPAN_MAX, (first_entry_id, last_entry_id)
        self.first_entry_id = first_entry_id
        self.values = array("Q", bytes(8 * span))

    def of(self, entry_id: int) -> int:
        """``NO_FINGERPRINT`` for an entry that did not come whole."""
        position = entry_id - self.first_entry_id
        return self.values[position] if 0 <= position < len(self.values) else NO_FINGERPRINT

    def add(self, entry: bytes, *, digest_bytes: int) -> None:
        """Of an entry that is good."""
        entry_id, length = ID_AND_LENGTH.unpack_from(entry)
        payload = entry[HEADER_BYTES + digest_bytes :]
        self.values[entry_id - self.first_entry_id] = fingerprint(payload, length)


def fingerprint(payload: bytes, length: int) -> int:
    """Never ``NO_FINGERPRINT``: 64 bits, of the payload's checksum and the length."""
    return (google_crc32c.value(payload) << 32 | length & _LENGTH_MASK) or 1
