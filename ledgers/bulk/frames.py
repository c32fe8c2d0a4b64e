"""The V2 frames that the bulk path needs, and digest checks in place.

A read reply and the recovery add of the same entry have the same length: 28 bytes, then the entry.
So a reply becomes an add when the add's header word and master key overwrite its bytes 4 to 27.
``ledgers.wire`` has the whole protocol.
"""

import struct
import zlib
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache

import google_crc32c

from ledgers.digest import HEADER_BYTES, ID_AND_LENGTH, EntryDigest, Fingerprints, fingerprint
from ledgers.model import DigestType

READ_WORD = 0x0202_0000
"""Header word of a read without flags, and of its reply: version 2, operation 2."""
ADD_REPLY_WORD = 0x0201_0000
RECOVERY_ADD_WORD = 0x0201_0002
"""A recovery add, which a fenced ledger accepts. Low priority, so that clients go first."""

REPLY = struct.Struct(">iiiqq")
"""The start of every reply: packet length, header word, code, ledger id, entry id."""
REPLY_BYTES = REPLY.size
REPLY_PACKET_BYTES = REPLY_BYTES - 4
"""A packet is a frame without its length field."""

READ_REPLY = struct.Struct(">iiiqqqq16xII")
"""REPLY, then the entry's own ledger id and entry id, and the first 8 bytes of its digest."""
SLACK_BYTES = READ_REPLY.size
"""Free bytes behind received bytes, so that READ_REPLY can be unpacked at any reply."""

BATCH_WORD = 0x0207_0000
BATCH_REPLY = struct.Struct(">iiiqqq")
"""The start of a reply to a batch read: REPLY with the id of the first entry, then the request id.
If the code is good, the entries follow, each after its size."""
BATCH_REPLY_BYTES = BATCH_REPLY.size
BATCH_ENTRY = struct.Struct(">iqq16xII")
"""The start of an entry in a batch: size, ledger id, entry id, first 8 bytes of the digest."""

_READ = struct.Struct(">iiqq")
_READ_BATCH = struct.Struct(">iiqqqiq")
_IDS = struct.Struct(">qq")

DigestCheck = Callable[[memoryview, int, int, int, int], bool]
"""Returns True if an entry's digest is good. Arguments: the buffer, start and stop of the entry,
and the first two words of its digest. The caller checks its length and ids."""


def read_requests(ledger_id: int, entry_ids: Iterable[int]) -> bytes:
    pack = _READ.pack
    return b"".join([pack(20, READ_WORD, ledger_id, entry_id) for entry_id in entry_ids])


def batch_request(
    ledger_id: int, first_entry_id: int, *, request_id: int, count_max: int, bytes_max: int
) -> bytes:
    return _READ_BATCH.pack(
        _READ_BATCH.size - 4,
        BATCH_WORD,
        ledger_id,
        first_entry_id,
        request_id,
        count_max,
        bytes_max,
    )


def recovery_add_prefix(master_key: bytes) -> bytes:
    """Return the bytes that turn a read reply into a recovery add, from byte 4 on."""
    assert len(master_key) == 20, len(master_key)
    return RECOVERY_ADD_WORD.to_bytes(4, "big") + master_key


@lru_cache(maxsize=1_024)  # ledgers share their digests
def digest_check(digest: EntryDigest) -> DigestCheck:
    """Return the fastest check for this type of digest."""
    match digest.digest_type:
        case DigestType.CRC32C:
            return _is_good_crc32c
        case DigestType.CRC32:
            return _is_good_crc32
        case DigestType.HMAC | DigestType.DUMMY:

            def is_good(view: memoryview, start: int, stop: int, first: int, second: int) -> bool:
                ledger_id, entry_id = _IDS.unpack_from(view, start)
                return digest.is_good(view[start:stop], ledger_id=ledger_id, entry_id=entry_id)

            return is_good


def fingerprinting_check(digest: EntryDigest, found: Fingerprints) -> DigestCheck:
    """Return a check that also stores fingerprints of good entries. It costs 0.4 us more."""
    values, first_entry_id = found.values, found.first_entry_id
    if digest.digest_type is DigestType.CRC32C:
        return _fingerprinting_crc32c(values, first_entry_id)
    check = digest_check(digest)
    overhead_bytes = HEADER_BYTES + digest.size
    unpack = ID_AND_LENGTH.unpack_from

    def is_good(view: memoryview, start: int, stop: int, first: int, second: int) -> bool:
        if not check(view, start, stop, first, second):
            return False
        entry_id, length = unpack(view, start)
        payload = view[start + overhead_bytes : stop].tobytes()
        values[entry_id - first_entry_id] = fingerprint(payload, length)
        return True

    return is_good


def _fingerprinting_crc32c(values: "array[int]", first_entry_id: int) -> DigestCheck:
    """Like ``fingerprinting_check``, but copy the payload only once for both."""
    unpack = ID_AND_LENGTH.unpack_from

    def is_good(view: memoryview, start: int, stop: int, first: int, second: int) -> bool:
        header_stop = start + HEADER_BYTES
        payload = view[header_stop + 4 : stop].tobytes()
        crc = google_crc32c.value(view[start:header_stop].tobytes())
        if google_crc32c.extend(crc, payload) != first:
            return False
        entry_id, length = unpack(view, start)
        values[entry_id - first_entry_id] = fingerprint(payload, length)
        return True

    return is_good


def _is_good_crc32c(view: memoryview, start: int, stop: int, first: int, second: int) -> bool:
    header_stop = start + HEADER_BYTES
    crc = google_crc32c.value(view[start:header_stop].tobytes())
    return bool(google_crc32c.extend(crc, view[header_stop + 4 : stop].tobytes()) == first)


def _is_good_crc32(view: memoryview, start: int, stop: int, first: int, second: int) -> bool:
    header_stop = start + HEADER_BYTES
    crc = zlib.crc32(view[start:header_stop])
    return first == 0 and zlib.crc32(view[header_stop + 8 : stop], crc) == second
