"""Reads an archive: its points in time, and the state of the metadata at one of them.

The methods block. A base and the changes after it are merged by key, so no method needs memory for
all ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import merge
from itertools import accumulate, groupby, islice, pairwise
from operator import attrgetter
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
from ledgers.errors import BookmenderError, CorruptionError, RejectedError
from ledgers.typed import decode_json

READS_AT_ONCE: Final = 16
"""An object store takes tens of milliseconds for each file."""
LAST: Final[Key] = b"\xff"
"""Greater than all keys, which are ASCII at the beginning."""
SAMPLED: Final = 64
"""One in this number of changes tells how the changed keys are distributed."""


class NoSuchPointError(BookmenderError):
    """The archive has no complete state of this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of the archive that was read and not cut or changed. ``sha256``: hexadecimal.
    ``name``: for errors. ``content``: where its records are."""

    name: str
    header: Header
    sha256: str
    data: bytes = field(repr=False)
    content: slice = field(repr=False)

    @classmethod
    def parse(cls, data: bytes, *, number: int, name: str) -> StoredFile:
        """Raises CorruptionError."""
        header, sha256, content = decode_header(data, name=name)
        if header.number != number:
            raise CorruptionError("a file of the archive has the name of another one", name=name)
        return cls(name=name, header=header, sha256=sha256, data=data, content=content)

    def records(self) -> list[Record]:
        """Raises CorruptionError."""
        return decode_records(self.data[self.content], name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A moment whose state the archive has. ``base``: the base that the state begins with.
    ``header``: of the last file that counts."""

    base: Header
    header: Header


class Archive:
    """Reads the archive in a place. ``changes_at_once``: what ``state`` keeps in memory, some 600
    bytes each. It reads the changes again for each so many."""

    def __init__(self, place: Place, *, changes_at_once: int = 1_000_000) -> None:
        self._place, self._changes_at_once = place, changes_at_once

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
        pack = StoredFile.parse(data, number=numbers[0], name=name)
        starts = accumulate(pack.header.sizes, initial=pack.content.start)
        return {
            number: StoredFile.parse(data[start:end], number=number, name=name)
            for number, (start, end) in zip(numbers, pairwise(starts), strict=True)
        }

    def head(self) -> StoredFile | None:
        """Return the last file; None if the archive is empty."""
        numbers = self.numbers()
        return self.file(numbers[-1]) if numbers else None

    def check_cluster(self, instance_id: str) -> None:
        """Raise RejectedError if the archive is of another cluster. A cluster without an instance
        id may be any. Raises CorruptionError."""
        head = self.head()
        if head and instance_id and head.header.cluster not in ("", instance_id):
            raise RejectedError(
                f"the archive there is of another cluster, with the instance id "
                f"{head.header.cluster}. Use another URL for this one"
            )

    def latest(self) -> Confirmed | None:
        """Return what the archiver said last; None: nothing. Raises CorruptionError if that is
        unreadable, or names a file that is missing."""
        if (data := self._place.read(LATEST)) is None:
            return None
        try:
            latest = decode_json(data, Confirmed)
        except ValueError as error:
            raise CorruptionError("an unreadable file of the archive", name=LATEST) from error
        if latest.number > max(self.numbers(), default=0):
            raise CorruptionError(
                "the last files of the archive are missing", name=file_name(latest.number)
            )
        return latest

    def confirmed_ms(self, point: Point) -> int:
        """Return until when nothing changed after this point, as the archiver said last; 0: it is
        unknown, or something did."""
        with suppress(CorruptionError):
            latest, end = self.latest(), point.header
            if latest and (latest.generation, latest.checkpoint) == (end.generation, end.end):
                return latest.time_ms
        return 0

    def bases(self) -> Iterator[Header]:
        """Yield the complete bases, newest first, as long as all files that they need exist. A base
        that is damaged is left out."""
        numbers = self.numbers()
        number = max(numbers, default=0)
        while number and number >= numbers[0]:
            try:
                header = self.file(number).header
            except CorruptionError:
                number -= 1  # the file before it names an earlier base
                continue
            if header.kind is FileKind.BASE:
                if header.first_page < numbers[0]:  # retention has deleted a part
                    return
                yield header
            number = header.base

    def point(
        self,
        *,
        time_ms: int | None = None,
        checkpoint: CheckpointId | None = None,
        is_exact: bool = True,
    ) -> Point:
        """Return the last point that is not after this time or checkpoint; without both, the last.

        ``is_exact``: only points whose state has no later version of a ledger. Raises
        NoSuchPointError, and CorruptionError if files before the wanted moment are missing or
        damaged.
        """

        def is_wanted(header: Header) -> bool:
            return (time_ms is None or header.time_ms <= time_ms) and (
                checkpoint is None or header.end <= checkpoint
            )

        if not (last := max(self.numbers(), default=0)):
            raise no_archive()
        base = None
        for base in self.bases():
            if not is_wanted(base):
                continue
            found, end = base, base.end
            try:
                # What follows the wanted checkpoint may be damaged.
                for stored in self.files(base.number, last) if end != checkpoint else ():
                    header = stored.header
                    if header.kind is not FileKind.SEGMENT:
                        continue
                    if (header.generation, header.begin) != (base.generation, end):
                        break  # a gap: the feed began again, or lost changes during a pause
                    if not is_wanted(header):
                        break
                    if header.end > end:
                        end = header.end
                        found = header if header.is_exact or not is_exact else found
                    if end == checkpoint:
                        break
                else:
                    if end != checkpoint:
                        self.latest()  # later files may be missing
            except CorruptionError as error:
                raise _damaged_after(found, error) from error
            return Point(base=base, header=found)
        if base is None:
            raise NoSuchPointError("the archive has no complete state yet")
        first = datetime.fromtimestamp(base.time_ms / 1000, UTC)
        raise NoSuchPointError(f"the archive begins later, at {first:%Y-%m-%d %H:%M:%S} UTC")

    def state(self, point: Point) -> Iterator[Record]:
        """Yield the latest record of each object that exists at a point, by ascending key. Raises
        CorruptionError."""
        records = merge(self._records_of_base(point.base), self._changes(point), key=_key)
        for _, versions in groupby(records, key=_key):
            latest = max(versions, key=attrgetter("version"))
            if latest.data is not None:
                yield latest

    def _records_of_base(self, base: Header) -> Iterator[Record]:
        previous = b""
        for stored in self.files(base.first_page, base.number):
            header = stored.header
            if header.kind is not FileKind.PAGE or header.first_page != base.first_page:
                continue
            for record in stored.records():
                if record.key <= previous:
                    raise CorruptionError("a base is not sorted", name=file_name(header.number))
                previous = record.key
                yield record

    def _changes(self, point: Point) -> Iterator[Record]:
        """Yield the latest record of each object that changed since the base was begun, by
        ascending key. Of many changes, it reads and keeps a range of keys at a time."""
        sampled = sorted(each.key for each in islice(self._segments(point), 0, None, SAMPLED))
        range_size = max(1, self._changes_at_once // SAMPLED)
        bounds = sampled[range_size::range_size]
        for low, high in pairwise([b"", *bounds, LAST]):
            latest = dict[Key, Record]()
            for record in self._segments(point):
                if low <= record.key < high:
                    known = latest.get(record.key, record)
                    latest[record.key] = max(known, record, key=attrgetter("version"))
            yield from (latest[key] for key in sorted(latest))

    def _segments(self, point: Point) -> Iterator[Record]:
        for stored in self.files(point.base.first_page, point.header.number):
            if stored.header.kind is FileKind.SEGMENT:
                yield from stored.records()


def no_archive() -> NoSuchPointError:
    return NoSuchPointError("there is no archive here. Check its URL, and whether it is mounted")


def _damaged_after(whole: Header, error: CorruptionError) -> CorruptionError:
    """Return the error that also names the last state before the damage."""
    text = f"{error.args[0]}. The last state before the damage: --at {whole.end:#x}"
    return CorruptionError(text, **error.context)


_key = attrgetter("key")
