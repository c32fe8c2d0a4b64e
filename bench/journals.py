"""What bookies were really given: counted in their journals, where each accepted add stands.

So an entry that is copied twice counts twice, whoever copied it, and bookies need no metrics. The
format is that of BookKeeper's JournalChannel, version 5 and later: a header of one sector, then
records of a length and that many bytes, and between them padding.
"""

import mmap
import struct
from collections.abc import Container, Iterator
from pathlib import Path

MAGIC = b"BKLG"
VERSION_OLDEST = 5
HEADER_BYTES = 512
PADDING = -0x100
"""In place of a record's length; the length of the padding follows."""
_LENGTH = struct.Struct(">i")
_IDS = struct.Struct(">qq")


def added_bytes(journals: Path, ledger_ids: Container[int], *, since_s: float) -> int:
    """Of entries of these ledgers, as stored, in the journals written to since then (wall
    clock)."""
    files = sorted(journals.glob("current/*.txn"))
    return sum(
        size
        for file in files
        if file.stat().st_mtime >= since_s
        for ledger_id, entry_id, size in records(file)
        # Below 0 are the bookie's own: a ledger's master key, its fence.
        if entry_id >= 0 and ledger_id in ledger_ids
    )


def records(journal: Path) -> Iterator[tuple[int, int, int]]:
    """Ledger id, entry id and size of each; up to the end, or to where the bookie was killed."""
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
