"""Damage to the files of stopped bookies. None of it passes through a bookie.

This works for bookies with sorted or interleaved storage (``LedgerDirsManager``, ``EntryLogger``,
``FileInfo``). A ledger's index has a header and 8 bytes for each entry: the number of an entry log,
and the offset in it. There the entry follows its size.
"""

import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daemon.local.cluster import LocalCluster
from daemon.local.spec import port_of
from ledgers.digest import HEADER_BYTES, EntryDigest, EntryHeader
from ledgers.model import BookieId
from tests.cluster.bookies_in_trouble import expire

FILE_HEADER_BYTES = 1024
"""The size of the header of an entry log, and of an index."""
_SLOT = struct.Struct(">q")
_ENTRY_BYTES = struct.Struct(">i")
_IDENTITY = "VERSION"
"""The file of the cookie. A bookie that ZooKeeper knows refuses to start without it."""


@contextmanager
def stopped(cluster: LocalCluster, bookies: Sequence[BookieId]) -> Iterator[None]:
    """Stop the bookies for a while, with all data in their storage and none in their journals.

    A bookie that stops leaves data in its journal. When it starts, it replays the journal, which
    would repair every damage.
    """
    _terminate(cluster, bookies)
    cluster.start_bookies(bookies)
    _terminate(cluster, bookies)
    yield
    cluster.start_bookies(bookies)


def _terminate(cluster: LocalCluster, bookies: Sequence[BookieId]) -> None:
    """Stop the bookies. One that had to be killed has not stored everything, so repeat it."""
    for bookie in bookies:
        while not cluster.terminate(bookie):
            expire(cluster, bookie)
            cluster.start_bookie(bookie)


def storage(cluster: LocalCluster, bookie: BookieId) -> Path:
    """Return the folder of the bookie's entry logs and indexes."""
    return cluster.data / "bookies" / str(port_of(bookie)) / "ledgers" / "current"


# --- A whole bookie -------------------------------------------------------------------------------


def cut_entry_logs(files: Path) -> None:
    """Truncate entry logs after their headers. The indexes still refer to the entries."""
    for path in files.glob("*.log"):
        path.write_bytes(path.read_bytes()[:FILE_HEADER_BYTES])


def wipe_but_identity(files: Path) -> None:
    """Delete everything except the cookie, and the journal.

    The disks may have been replaced, and the cookie copied back.
    """
    for folder in (files, files.parents[1] / "journal" / "current"):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _IDENTITY:
                path.unlink()


# --- One copy -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A ledger as one bookie has it. ``files``: the bookie's storage."""

    files: Path
    ledger_id: int
    digest: EntryDigest

    def remove(self, entry_id: int = -1) -> None:
        """Delete the whole copy. The bookie does not know the ledger then."""
        self._index.unlink()

    def forget(self, entry_id: int) -> None:
        """Delete the index entry. The bookie then answers that there is no such entry."""
        with self._index.open("r+b") as index:
            index.seek(FILE_HEADER_BYTES + _SLOT.size * entry_id)
            index.write(bytes(_SLOT.size))

    def flip(self, entry_id: int) -> None:
        """Flip the last bit of the payload.

        The digest shows it, but bookies do not check digests.
        """
        self._rewrite(entry_id, lambda entry: entry[:-1] + bytes([entry[-1] ^ 1]))

    def garble(self, entry_id: int) -> None:
        """Overwrite the entry's header. The bookie then fails with a read error."""
        self._rewrite(entry_id, lambda entry: b"\x7f" * HEADER_BYTES + entry[HEADER_BYTES:])

    def replace(self, entry_id: int) -> None:
        """Replace the payload by another one with a right digest."""

        def other(entry: bytes) -> bytes:
            payload = bytes(len(self.digest.payload(entry)))
            return self._packed(EntryHeader.of(entry), payload=payload)

        self._rewrite(entry_id, other)

    def lengthen(self, entry_id: int) -> None:
        """Change the ledger length in the entry. Payload and digest are right."""

        def other(entry: bytes) -> bytes:
            return self._packed(EntryHeader.of(entry), payload=self.digest.payload(entry), more=1)

        self._rewrite(entry_id, other)

    def _packed(self, header: EntryHeader, *, payload: bytes, more: int = 0) -> bytes:
        return self.digest.pack(
            ledger_id=header.ledger_id,
            entry_id=header.entry_id,
            lac=header.lac,
            length=header.length + more,
            payload=payload,
        )

    def _rewrite(self, entry_id: int, change: Callable[[bytes], bytes]) -> None:
        """Replace the entry. ``change`` must return an entry of the same size."""
        place = self._place(entry_id)
        with (self.files / f"{place >> 32:x}.log").open("r+b") as log:
            at = place & 0xFFFF_FFFF
            log.seek(at - _ENTRY_BYTES.size)
            (size,) = _ENTRY_BYTES.unpack(log.read(_ENTRY_BYTES.size))
            entry = log.read(size)
            header = EntryHeader.of(entry)
            assert (header.ledger_id, header.entry_id) == (self.ledger_id, entry_id), header
            changed = change(entry)
            assert len(changed) == size, self
            log.seek(at)
            log.write(changed)

    def _place(self, entry_id: int) -> int:
        with self._index.open("rb") as index:
            index.seek(FILE_HEADER_BYTES + _SLOT.size * entry_id)
            (place,) = _SLOT.unpack(index.read(_SLOT.size))
        assert place, f"ledger {self.ledger_id} has no entry {entry_id} in {self.files}"
        return int(place)

    @property
    def _index(self) -> Path:
        parents = f"{self.ledger_id >> 8 & 0xFF:x}/{self.ledger_id & 0xFF:x}"
        return self.files / parents / f"{self.ledger_id:x}.idx"
