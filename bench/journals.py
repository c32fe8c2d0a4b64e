"""Counts what bookies stored, from their journals, which contain every accepted add.

An entry that is copied twice counts twice, for any client, and bookies need no metrics. The format
is that of BookKeeper's JournalChannel, version 5 and later: a header of one sector, then records of
a length and that many bytes, with padding between them.
"""

import mmap
import struct
from collections.abc import Container, Iterator
from pathlib import Path

MAGIC = b"BKLG"
VERSION_OLDEST = 5
HEADER_BYTES = 512
PADDING = -0x100
"""Replaces the length of a record; the length of the padding follows."""
_LENGTH = struct.Struct(">i")
_IDS = struct.Struct(">qq")


def added_bytes(journals: Path, ledger_ids: Container[int], *, since_s: float) -> int:
    """Return the bytes of the ledgers' entries, as stored, in journals written since the given
    wall-clock time."""
    files = sorted(journals.glob("current/*.txn"))
    return sum(
        size
        for file in files
        if file.stat().st_mtime >= since_s
        for ledger_id, entry_id, size in records(file)
        # Entry ids below 0 are the bookie's own records: a ledger's master key, its fence.
        if entry_id >= 0 and ledger_id in ledger_ids
    )


def records(journal: Path) -> Iterator[tuple[int, int, int]]:
    """Yield ledger id, entry id and size of each record, up to the end or to the place where the
    bookie was killed."""
    if journal.stat().st_size <= HEADER_BYTES:
        return
    with journal.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        version = _LENGTH.unpack_from(data, len(MAGIC))[0]
        assert data[: len(MAGIC)] == MAGIC, journal
        assert version >= VERSION_OLDEST, (journal, version)
        at = HEADER_BYTES
        while at + _LENGTH.size + _IDS.size <= len(data):
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            if size == PADDING:
                at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
                continue
            if size <= 0 or at + size > len(data):
                return
            yield *_IDS.unpack_from(data, at), size
            at += size
