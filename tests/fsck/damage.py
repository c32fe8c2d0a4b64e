"""Damage done for real, to the files of bookies that are stopped. Nothing of it passes through a
bookie.

For bookies with sorted or interleaved storage (``LedgerDirsManager``, ``EntryLogger``,
``FileInfo``): a ledger's index holds 8 bytes for each entry behind a header, the number of an entry
log and the place in it; an entry stands there behind its size.
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
"""Of an entry log, and of an index."""
_SLOT = struct.Struct(">q")
_ENTRY_BYTES = struct.Struct(">i")
_IDENTITY = "VERSION"
"""The cookie: a bookie without it that is known to ZooKeeper refuses to start."""


@contextmanager
def stopped(cluster: LocalCluster, bookies: Sequence[BookieId]) -> Iterator[None]:
    """Within it, all that the bookies have stands in their storage, and nothing in their journals.

    A bookie that ends leaves it in the journal, which heals every damage: it goes through that when
    it starts.
    """
    _terminate(cluster, bookies)
    cluster.start_bookies(bookies)
    _terminate(cluster, bookies)
    yield
    cluster.start_bookies(bookies)


def _terminate(cluster: LocalCluster, bookies: Sequence[BookieId]) -> None:
    """One that has to be killed has not stored all: it is started and ended anew, whatever is left
    of its session."""
    for bookie in bookies:
        while not cluster.terminate(bookie):
            expire(cluster, bookie)
            cluster.start_bookie(bookie)


def storage(cluster: LocalCluster, bookie: BookieId) -> Path:
    """Where its entry logs and indexes lie."""
    return cluster.data / "bookies" / str(port_of(bookie)) / "ledgers" / "current"


# --- A whole bookie --------------------------------------------------------------------------------


def cut_entry_logs(files: Path) -> None:
    """Behind their headers: the indexes tell of entries that are no longer there."""
    for path in files.glob("*.log"):
        path.write_bytes(path.read_bytes()[:FILE_HEADER_BYTES])


def wipe_but_identity(files: Path) -> None:
    """As disks that were replaced, and to which somebody copied the cookie back. The journal goes
    as well."""
    for folder in (files, files.parents[1] / "journal" / "current"):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _IDENTITY:
                path.unlink()


# --- One copy --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One ledger, as one bookie has it. ``files``: the bookie's storage."""

    files: Path
    ledger_id: int
    digest: EntryDigest

    def remove(self, entry_id: int = -1) -> None:
        """The whole of it: the bookie has never heard of the ledger."""
        self._index.unlink()

    def forget(self, entry_id: int) -> None:
        """The bookie says that there is no such entry."""
        with self._index.open("r+b") as index:
            index.seek(FILE_HEADER_BYTES + _SLOT.size * entry_id)
            index.write(bytes(_SLOT.size))

    def flip(self, entry_id: int) -> None:
        """The last bit of its payload, which its digest tells, but no bookie looks at."""
        self._rewrite(entry_id, lambda entry: entry[:-1] + bytes([entry[-1] ^ 1]))

    def garble(self, entry_id: int) -> None:
        """The bookie finds another entry than its index says: a read error."""
        self._rewrite(entry_id, lambda entry: b"\x7f" * HEADER_BYTES + entry[HEADER_BYTES:])

    def replace(self, entry_id: int) -> None:
        """By another payload with a right digest."""

        def other(entry: bytes) -> bytes:
            payload = bytes(len(self.digest.payload(entry)))
            return self._packed(EntryHeader.of(entry), payload=payload)

        self._rewrite(entry_id, other)

    def lengthen(self, entry_id: int) -> None:
        """The same payload, and a right digest, but another length of the ledger up to here."""

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
        """``change``: to an entry of the same size."""
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
