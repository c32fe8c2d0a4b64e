"""Reads an archive: its points in time, and the state of the metadata at one of them.

The methods block. ``state`` needs memory for what changed after the base that it begins with, and
not for all ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from archive.format import (
    LATEST,
    Confirmed,
    FileKind,
    Header,
    Record,
    block_of,
    decode_header,
    decode_records,
    file_name,
    files_of,
    numbers_of,
    pack_name,
)
from archive.places import Place
from checkpoints.model import CheckpointId, Key
from ledgers.errors import BookmenderError, CorruptionError
from ledgers.typed import decode_json

READS_AT_ONCE: Final = 16
"""An object store takes tens of milliseconds for each file."""


class NoSuchPointError(BookmenderError):
    """The archive has no complete state of this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of the archive that was read and not cut or changed. ``sha256``: hexadecimal.
    ``name``: for errors."""

    name: str
    header: Header
    sha256: str
    data: bytes = field(repr=False)
    _records: slice

    @classmethod
    def parse(cls, data: bytes, *, number: int, name: str) -> StoredFile:
        """Raises CorruptionError."""
        header, sha256, records = decode_header(data, name=name)
        if header.number != number:
            raise CorruptionError("a file of the archive has the name of another one", name=name)
        return cls(name=name, header=header, sha256=sha256, data=data, _records=records)

    def records(self) -> list[Record]:
        """Raises CorruptionError."""
        return decode_records(self.data[self._records], name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A moment whose state the archive has. ``base``: the base that the state begins with.
    ``number``: of the last file that counts. ``header``: of this file."""

    base: Header
    number: int
    header: Header


class Archive:
    """Reads the archive in a place."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def stored(self) -> list[tuple[range, str]]:
        """Return the numbers and the name of each file and pack, ascending."""
        found = ((numbers_of(name), name) for name in self._place.names())
        return sorted((each for each in found if each[0]), key=lambda each: each[0].start)

    def numbers(self) -> range:
        """Return the numbers of the files from the first to the last."""
        stored = self.stored()
        if not stored:
            return range(0)
        return range(stored[0][0].start, max(numbers.stop for numbers, _ in stored))

    def file(self, number: int) -> StoredFile:
        """Raises CorruptionError, also if the file is missing."""
        packed = self._pack(block_of(number))
        return packed[number] if packed else self._unpacked(number)

    def files(self, first: int, last: int) -> Iterator[StoredFile]:
        """Yield these files in order, both ends inclusive. Raises CorruptionError if one is
        missing, or does not follow the one before it."""
        previous: str | None = None
        for stored in self._read(first, last):
            if previous not in (None, stored.header.previous):
                raise CorruptionError(
                    "a file of the archive does not follow the one before it", name=stored.name
                )
            previous = stored.sha256
            yield stored

    def _read(self, first: int, last: int) -> Iterator[StoredFile]:
        with ThreadPoolExecutor(READS_AT_ONCE, "archive") as pool:
            for block in range(block_of(first), block_of(last) + 1):
                numbers = [n for n in files_of(block) if first <= n <= last]
                if packed := self._pack(block):
                    yield from map(packed.__getitem__, numbers)
                    continue
                for start in range(0, len(numbers), READS_AT_ONCE):
                    yield from pool.map(self._unpacked, numbers[start : start + READS_AT_ONCE])

    def _unpacked(self, number: int) -> StoredFile:
        name, block = file_name(number), block_of(number)
        if (data := self._place.read(name)) is not None:
            return StoredFile.parse(data, number=number, name=name)
        if packed := self._pack(block):  # since then
            return packed[number]
        raise CorruptionError("a file of the archive is missing", name=name, pack=pack_name(block))

    def _pack(self, block: int) -> dict[int, StoredFile] | None:
        """Return the files of a pack, by number; None if there is no such pack."""
        name, numbers = pack_name(block), files_of(block)
        if (data := self._place.read(name)) is None:
            return None
        files = StoredFile.parse(data, number=numbers[0], name=name).records()
        return {
            number: StoredFile.parse(each.data or b"", number=number, name=name)
            for number, each in zip(numbers, files, strict=True)
        }

    def head(self) -> StoredFile | None:
        """Return the last file; None if the archive is empty."""
        numbers = self.numbers()
        return self.file(numbers[-1]) if numbers else None

    def confirmed_ms(self, point: Point) -> int:
        """Return until when nothing changed after this point, as the archiver said last; 0: it is
        unknown, or something did. Raises CorruptionError if a file that it knew is missing."""
        data = self._place.read(LATEST)
        if data is None:
            return 0
        try:
            latest = decode_json(data, Confirmed)
        except ValueError as error:
            raise CorruptionError("an unreadable file of the archive", name=LATEST) from error
        if latest.number > max(self.numbers(), default=0):
            raise CorruptionError(
                "the last files of the archive are missing", name=file_name(latest.number)
            )
        end = point.header
        is_same = (latest.generation, latest.checkpoint) == (end.generation, end.end)
        return latest.time_ms if is_same else 0

    def bases(self) -> Iterator[Header]:
        """Yield the complete bases, newest first, as long as all files that they need exist."""
        numbers = self.numbers()
        if not numbers:
            return
        head = self.file(numbers[-1]).header
        number = head.number if head.kind is FileKind.BASE else head.base
        while number >= numbers[0]:
            base = self.file(number).header
            if base.first_page < numbers[0]:  # retention has deleted a part
                return
            yield base
            number = base.base

    def point(
        self,
        *,
        time_ms: int | None = None,
        checkpoint: CheckpointId | None = None,
        is_exact: bool = True,
    ) -> Point:
        """Return the last point that is not after this time or checkpoint; without both, the last.

        ``is_exact``: only points whose state has no later version of a ledger. Raises
        NoSuchPointError, CorruptionError.
        """

        def is_wanted(header: Header) -> bool:
            return (time_ms is None or header.time_ms <= time_ms) and (
                checkpoint is None or header.end <= checkpoint
            )

        last = max(self.numbers(), default=0)
        for base in self.bases():
            if not is_wanted(base):
                continue
            found, end = base, base.end
            for stored in self.files(base.number + 1, last):
                header = stored.header
                if header.kind is not FileKind.SEGMENT:
                    continue
                if (header.generation, header.begin) != (base.generation, end):
                    break  # a gap: the feed began again, or its retention was shorter than a pause
                if not is_wanted(header):
                    break
                if header.end > end:
                    end = header.end
                    found = header if header.is_exact or not is_exact else found
            return Point(base=base, number=found.number, header=found)
        raise NoSuchPointError(
            "the archive has no state of this moment: it begins later, or has a gap here"
        )

    def state(self, point: Point) -> Iterator[Record]:
        """Yield the latest record of each object that exists at a point. Ledgers of the base come
        first, by ascending id. Raises CorruptionError."""
        base, changed = point.base, dict[Key, Record]()
        for stored in self.files(base.first_page, point.number):
            if stored.header.kind is FileKind.SEGMENT:
                for record in stored.records():
                    known = changed.get(record.key)
                    if known is None or known.version < record.version:
                        changed[record.key] = record
        for stored in self.files(base.first_page, base.number):
            header = stored.header
            if header.kind is not FileKind.PAGE or header.first_page != base.first_page:
                continue
            for record in stored.records():
                later = changed.pop(record.key, None)
                latest = record if later is None or later.version < record.version else later
                if latest.data is not None:
                    yield latest
        yield from (record for record in changed.values() if record.data is not None)
