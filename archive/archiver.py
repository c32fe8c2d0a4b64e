"""Writes the archive: follows the change feed, and reads the metadata of what changed.

A round reads the changes between two checkpoints, then the bytes of these ledgers from ZooKeeper,
and writes them as a segment. The archive itself says how far it is, so a round that was killed is
repeated by any other node.

A base is written beside the segments, a page a round. The first base lists and reads all ledgers in
ZooKeeper; they may change meanwhile, but then a segment has the later version. So a base is
complete when the segments have passed everything that its pages have. Later bases are made of the
archive alone. Afterwards what only older points need is deleted.

Each 64 files are put into a pack once there are as many newer ones. Every point stays.

The archive begins again with a base if the feed does not have the changes after its end: another
feed began, or the archive paused for longer than the retention of the feed. Earlier points stay.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Final, Protocol, TypeVar
from uuid import uuid4

import msgspec
import structlog
from msgspec.structs import replace
from prometheus_client import Counter, Gauge

from archive.format import (
    DATA_BYTES_MAX,
    LATEST,
    PACK_BYTES_MAX,
    RECORDS_MAX,
    SHA_BYTES,
    Confirmed,
    FileKind,
    Header,
    Record,
    block_of,
    encode_file,
    encode_pack,
    file_name,
    files_of,
    ledger_record,
    pack_name,
)
from archive.places import Place, TakenError
from archive.reading import Archive, NoSuchPointError, Point
from archive.znodes import read_ledgers, read_znodes
from checkpoints.batches import (
    Batch,
    BatchReader,
    ChangesLostError,
    LedgerChange,
    Offset,
    batch_between,
    latest_offset,
)
from checkpoints.chain import FeedChain, read_chain
from checkpoints.feed_ledgers import FeedLedgers
from checkpoints.model import CheckpointId, Key, Version
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.manager import LedgerManager
from ledgers.registration import read_instance_id
from ledgers.store import MetadataStore
from ledgers.tasks import in_daemon_thread
from replication.znodes import ClusterPaths

T = TypeVar("T")

log = structlog.get_logger()

ROUND_S: Final = 0.5
"""Shortest time between two segments."""
QUIET_S: Final = 60.0
"""Without changes, a segment says this often that nothing changed."""
CHECK_S: Final = 30.0
"""How often the archiver looks whether its last file and its base still exist."""
CONFIRM_S: Final = 5.0
"""How often the archive itself says up to when it has everything."""
ZNODES_S: Final = 60.0
"""How often the znodes besides the ledgers are read."""
READS_AT_ONCE: Final = 128
TRIES, RETRY_S = 5, 1.0
"""How often a file is written before the archiver gives up for a while."""
PAGE_RECORDS: Final = 2_000
"""Ledgers of one page: the next segment waits while a page is read."""
CHANGES_OF_BASE_LEAST: Final = 200_000
"""A new base is written after this many changes, or as many as the last base has records, if these
are more. It bounds how long a restore reads."""
BASES_OF_RETENTION: Final = 4
"""A new base is due after this part of the retention: what is older than a base can be deleted."""
DELETED_A_ROUND: Final = 20
"""It bounds how long the next segment waits."""
CHANGES_AT_ONCE: Final = 50_000
"""Changes that are in memory together while a base is made of the archive: about 30 MB."""

FILES = Counter("bookmender_archive_files_total", "Files that this node added to the archive.")
BYTES = Counter("bookmender_archive_bytes_total", "Bytes that this node added to the archive.")
LAST_CHECKPOINT = Gauge(
    "bookmender_archive_last_checkpoint_timestamp_seconds",
    "Time up to which everything can be restored. 0 on nodes that do not archive.",
)


class FeedDisabledError(BookmenderError):
    """The change feed is disabled, so there is nothing to archive."""


class InThread(Protocol):
    async def __call__(self, call: Callable[[], T], /) -> T: ...


@dataclass(slots=True, kw_only=True)
class _Base:
    """A base that is being written. ``begin``: the checkpoint before its first page."""

    begin: CheckpointId
    pages: AsyncGenerator[list[Record], None]
    first_page: int = 0
    record_count: int = 0
    newest: Version = 0
    """The highest version of a ledger in its pages."""
    is_read: bool = False


@dataclass(kw_only=True)
class Archiver:
    """Writes the archive in one place. One task of one node may run it; another writer is noticed,
    and ends this one with TakenError."""

    store: MetadataStore
    manager: LedgerManager
    bookies: Bookies
    clock: Clock
    place: Place
    includes: Sequence[str] = ()
    """Further trees of znodes, as absolute paths."""
    retention_s: float = 30 * 86_400.0
    """How long points are kept."""
    base_ordered_ms: int = 0
    """A base that is older than this is followed by another one."""
    known_number: int = 0
    """The number of the last file, as the node that archived before said; 0: a new archive."""
    on_round: Callable[[], Awaitable[None]]
    """Called after each round."""
    in_thread: InThread = in_daemon_thread
    """Runs a call that blocks."""
    position: Offset | None = field(default=None, init=False)
    """Everything up to here is archived; None: a base must be begun."""
    time_ms: int = field(default=0, init=False)
    """Nothing changed from this checkpoint up to this time, wall clock."""
    restorable_ms: int = field(default=0, init=False)
    """Up to this time everything can be restored; 0: nothing. It stays behind ``time_ms`` while a
    base is written without which the segments cannot be restored."""
    number: int = field(default=0, init=False)
    """The number of the last file."""
    base: Header | None = field(default=None, init=False)
    """The newest complete base."""
    denied_count: int = field(default=0, init=False)
    """Changes that are not archived, because an ACL hides the ledger or its directory."""
    _writer: str = field(default_factory=lambda: uuid4().hex, init=False)
    _cluster: str = field(default="", init=False)
    """The instance id; empty if the cluster has none."""
    _sha256: str = field(default="", init=False)
    """SHA-256 of the last file, hexadecimal."""
    _is_exact: bool = field(default=True, init=False)
    _follows_base: bool = field(default=False, init=False)
    """``position`` can be restored with the newest complete base."""
    _since_base: int = field(default=0, init=False)
    _writing: _Base | None = field(default=None, init=False)
    _znodes: dict[Key, Record] = field(default_factory=dict, init=False)
    """The other znodes as they are archived."""
    _znodes_s: float = field(default=-math.inf, init=False)
    _written_s: float = field(default=-math.inf, init=False)
    _confirmed_s: float = field(default=-math.inf, init=False)
    _checked_s: float = field(default=-math.inf, init=False)
    _obsolete: list[str] = field(default_factory=list, init=False)
    """Names of files to delete, the first one last."""
    _block: int = field(default=0, init=False)
    """The next block to pack."""

    def __post_init__(self) -> None:
        self._archive = Archive(self.place, changes_at_once=CHANGES_AT_ONCE)
        self._paths = ClusterPaths.below(self.manager.root)
        self._feed = FeedLedgers(self.manager, self.bookies, self.clock)
        self._batches = BatchReader(
            store=self.store,
            paths=self._paths,
            manager=self.manager,
            bookies=self.bookies,
            clock=self.clock,
        )

    async def run(self) -> None:
        """Archive until cancelled. Raises TakenError if another writer is active, RejectedError if
        the archive is of another cluster, FeedDisabledError, UnavailableError, SessionLostError,
        and CorruptionError, also if files are missing."""
        self._cluster = await read_instance_id(self.store, self.manager.root) or ""
        await self.in_thread(self._resume)
        try:
            while True:
                began_s = self.clock.now_s()
                await self._round()
                await self.on_round()
                if self._writing is None:
                    await self.clock.sleep(max(0.0, began_s + ROUND_S - self.clock.now_s()))
        finally:
            LAST_CHECKPOINT.set(0)
            await self._give_up_base()

    def _resume(self) -> None:
        """Find out how far the archive is. Segments after a gap belong to no point, so then a base
        is begun."""
        if (head := self._archive.head()) is None:
            if self.known_number:
                raise _missing(
                    "the archive is empty, and had files before: its place may not be mounted"
                )
            self.place.prepare()
            return
        self._archive.check_cluster(self._cluster)
        self.number, self._sha256 = head.header.number, head.sha256
        self._find_obsolete(expires=False)
        try:
            point = self._archive.point(is_exact=False)
        except NoSuchPointError:
            return
        end = point.header
        self.base, self.time_ms, self.restorable_ms = point.base, end.time_ms, end.time_ms
        self._follows_base = True
        self.position = Offset(generation=end.generation, checkpoint=end.end, log=end.log)
        self._is_exact, self._since_base = end.is_exact, end.since_base
        records = self._archive.state(point)
        self._znodes = {record.key: record for record in records if record.ledger_id is None}

    # --- Segments ---------------------------------------------------------------------------------

    async def _round(self) -> None:
        chain, at, time_ms = await self._end_of_feed()
        if self.position is not None:
            try:
                at = latest_offset(self.position, at, chain=chain)
                batch = batch_between(self.position, at, may_lose=False, chain=chain)
                await self._write_segment(batch, at, time_ms)
            except ChangesLostError as error:
                log.warning("archive.begun_again", reason=str(error))
                self.position, self._follows_base = None, False
        if self.position is None:
            await self._give_up_base()
            self.position, self.time_ms, self._since_base = at, time_ms, 0
            self._writing = _Base(begin=at.checkpoint, pages=self._scan())
        await self._write_base()
        if self._follows_base:
            self.restorable_ms = self.time_ms
        await self._pack()
        await self.in_thread(self._delete_obsolete)
        if self.clock.now_s() - self._checked_s >= CHECK_S:
            self._checked_s = self.clock.now_s()
            await self.in_thread(self._check_files)
        if self.clock.now_s() - self._confirmed_s >= CONFIRM_S:
            self._confirmed_s = self.clock.now_s()
            assert self.position is not None
            confirmed = Confirmed(
                number=self.number,
                time_ms=self.time_ms,
                generation=self.position.generation,
                checkpoint=self.position.checkpoint,
            )
            latest = msgspec.json.encode(confirmed)
            await self.in_thread(lambda: self.place.replace(LATEST, latest))
        LAST_CHECKPOINT.set(self.restorable_ms / 1000)

    async def _end_of_feed(self) -> tuple[FeedChain, Offset, int]:
        """Return the feed, its last checkpoint, and the time of that."""
        stored = await read_chain(self.store, self._paths)
        if stored.error is not None:
            raise stored.error
        chain = stored.value
        if chain is None or not chain.is_enabled:
            raise FeedDisabledError("the change feed is disabled, and the archive is made of it")
        async with aclosing(self._feed.log_backwards(chain.logs)) as checkpoints:
            last = await anext(checkpoints, None)
        if last is None:
            return chain, Offset(generation=chain.generation, checkpoint=0), chain.changed_ms
        log_id = chain.log_of(last.id)
        at = Offset(generation=chain.generation, checkpoint=last.id, log=log_id)
        return chain, at, last.time_ms

    async def _write_segment(self, batch: Batch, at: Offset, time_ms: int) -> None:
        """Archive the changes of the batch, and other znodes that changed."""
        assert self.position is not None
        records, has_changes, is_exact = list[Record](), False, True
        async with aclosing(self._read_batch(batch)) as parts:
            async for some, are_exact in parts:
                has_changes, is_exact = True, is_exact and are_exact
                records += some
                if _is_full(records):
                    await self._add_segment(records, self.position, self.time_ms)
                    records = []
        records += await self._changed_znodes(at)
        now_s = self.clock.now_s()
        is_due = not batch.is_empty and now_s - self._written_s >= QUIET_S
        if records or has_changes or is_due:
            self._is_exact = self._is_exact if batch.is_empty else is_exact
            await self._add_segment(records, at, time_ms)
            # Only now: the next segment must begin where this one ends.
            self.position, self._written_s = at, now_s
        self.time_ms = time_ms

    async def _add_segment(self, records: Sequence[Record], end: Offset, time_ms: int) -> None:
        assert self.position is not None
        self._since_base += len(records)
        await self._add(
            FileKind.SEGMENT,
            records,
            begin=self.position.checkpoint,
            end=end,
            time_ms=time_ms,
            is_exact=self._is_exact,
        )

    async def _read_batch(self, batch: Batch) -> AsyncGenerator[tuple[list[Record], bool], None]:
        """Yield the metadata of some changed ledgers at a time, and whether each is of the version
        that ZooKeeper had at the end of the batch. Use it within ``aclosing``."""
        async with aclosing(self._batches.read(batch)) as parts:
            async for changes in parts:
                for start in range(0, len(changes), READS_AT_ONCE):
                    some = changes[start : start + READS_AT_ONCE]
                    read = await self._read_changes(some)
                    are_exact = all(
                        record is not None
                        and record.version <= batch.end
                        and (record.data is None) is change.is_deleted
                        for change, record in zip(some, read, strict=True)
                    )
                    yield [record for record in read if record is not None], are_exact

    async def _read_changes(self, changes: Sequence[LedgerChange]) -> list[Record | None]:
        """Return the metadata of these ledgers, not older than the changes. A ledger may have been
        deleted since. None: an ACL hides it."""
        wanted = {each.ledger_id: each.version for each in changes if not each.is_deleted}
        found = await read_ledgers(self.store, self.manager, list(wanted))
        behind = [i for i, version in wanted.items() if i in found and found[i].version < version]
        if behind:  # this server may be behind the feed
            await self.manager.sync(behind[0])
            found |= await read_ledgers(self.store, self.manager, behind)
        self.denied_count += len(wanted) - len(found)
        records: list[Record | None] = []
        for change in changes:
            version, record = change.version, found.get(change.ledger_id)
            if change.is_deleted:
                record = ledger_record(change.ledger_id, version=version, data=None)
            elif record is not None:
                record = replace(record, version=max(record.version, version))
            records.append(record)
        return records

    async def _changed_znodes(self, at: Offset) -> list[Record]:
        """Return the other znodes that changed since they were archived, once in a while."""
        now_s = self.clock.now_s()
        if now_s - self._znodes_s < ZNODES_S:
            return []
        self._znodes_s = now_s
        znodes = read_znodes(self.store, self.manager, self.includes)
        found = {record.key: record async for record in znodes}
        changed = [each for key, each in found.items() if self._znodes.get(key) != each]
        gone = [each for key, each in self._znodes.items() if key not in found]
        self._znodes = found
        return changed + [
            replace(each, version=max(each.version + 1, at.checkpoint), data=None) for each in gone
        ]

    # --- Bases ------------------------------------------------------------------------------------

    async def _write_base(self) -> None:
        """Write the next page of a base, or complete it."""
        assert self.position is not None
        if self._writing is None and self._is_base_due():
            point = await self.in_thread(lambda: self._archive.point(is_exact=False))
            pages = self._pages_of(point)
            self._writing = _Base(begin=self.position.checkpoint, pages=pages)
        if (base := self._writing) is None:
            return
        if not base.is_read:
            page = await anext(base.pages, None)
            base.is_read = page is None
            if page is not None:
                await self._add_page(base, page)
            return
        if self.position.checkpoint < base.newest:
            await self.clock.sleep(ROUND_S)  # its checkpoint comes
            return
        self.base = await self._add(
            FileKind.BASE,
            (),
            begin=base.begin,
            end=self.position,
            time_ms=self.time_ms,
            is_exact=self._is_exact,
            first_page=base.first_page,
            total_count=base.record_count,
        )
        self._writing, self._since_base, self._follows_base = None, 0, True
        log.info("archive.base_written", number=self.number, record_count=base.record_count)
        await self.in_thread(lambda: self._find_obsolete(expires=True))

    async def _add_page(self, base: _Base, page: list[Record]) -> None:
        header = await self._add(
            FileKind.PAGE,
            page,
            begin=base.begin,
            end=self.position,
            time_ms=self.time_ms,
            first_page=base.first_page,
        )
        base.first_page = base.first_page or header.number
        base.record_count += len(page)
        versions = (record.version for record in page if record.ledger_id is not None)
        base.newest = max(base.newest, *versions, 0)

    def _is_base_due(self) -> bool:
        if self.base is None:
            return False
        if self.base.time_ms < self.base_ordered_ms <= self.time_ms:
            return True
        if not self._since_base:
            return False
        age_s = (self.clock.wall_ms() - self.base.time_ms) / 1000
        return (
            self._since_base >= max(CHANGES_OF_BASE_LEAST, self.base.total_count)
            or age_s >= self.retention_s / BASES_OF_RETENTION
        )

    async def _scan(self) -> AsyncGenerator[list[Record], None]:
        """Yield all that exists, read from ZooKeeper, by ascending key: first the ledgers."""
        znodes = read_znodes(self.store, self.manager, self.includes)
        self._znodes = {record.key: record async for record in znodes}
        self._znodes_s = self.clock.now_s()
        others = sorted(self._znodes.values(), key=attrgetter("key"))
        ledger_ids = array("q")
        async for some in self.manager.ledger_ids(on_hidden=self._note_hidden):
            ledger_ids.extend(some)
        for start in range(0, len(ledger_ids), PAGE_RECORDS):
            page: list[Record] = []
            part = ledger_ids[start : start + PAGE_RECORDS]
            for first in range(0, len(part), READS_AT_ONCE):
                wanted = part[first : first + READS_AT_ONCE]
                found = await read_ledgers(self.store, self.manager, wanted)
                self.denied_count += len(wanted) - len(found)
                page += [record for record in found.values() if record.data is not None]
            yield page
        for start in range(0, max(1, len(others)), PAGE_RECORDS):
            yield others[start : start + PAGE_RECORDS]

    def _note_hidden(self, error: UnauthorizedError) -> None:
        self.denied_count += 1

    async def _pages_of(self, point: Point) -> AsyncGenerator[list[Record], None]:
        """Yield the state that the archive has of a point."""
        records = self._archive.state(point)
        while page := await self.in_thread(lambda: list(islice(records, PAGE_RECORDS))):
            yield page

    async def _give_up_base(self) -> None:
        if self._writing is not None:
            await self._writing.pages.aclose()
            self._writing = None

    # --- Files ------------------------------------------------------------------------------------

    async def _add(
        self,
        kind: FileKind,
        records: Sequence[Record],
        *,
        begin: CheckpointId,
        end: Offset | None,
        time_ms: int,
        is_exact: bool = True,
        first_page: int = 0,
        total_count: int = 0,
    ) -> Header:
        """Add a file. A page without ``first_page`` is the first one."""
        assert end is not None
        number = self.number + 1
        header = Header(
            kind=kind,
            number=number,
            previous=self._sha256,
            generation=end.generation,
            begin=begin,
            end=end.checkpoint,
            time_ms=time_ms,
            is_exact=is_exact,
            first_page=first_page or (number if kind is FileKind.PAGE else 0),
            total_count=total_count,
            base=0 if self.base is None else self.base.number,
            since_base=self._since_base,
            log=end.log,
            root=self.manager.root,
            cluster=self._cluster,
            writer=self._writer,
        )

        data = await self.in_thread(lambda: encode_file(header, records))
        await self._create(file_name(number), data)
        self.number, self._sha256 = number, data[-SHA_BYTES:].hex()
        FILES.inc()
        BYTES.inc(len(data))
        return header

    async def _create(self, name: str, data: bytes) -> None:
        """Write a file. A failed try may have written it."""
        left = TRIES
        while True:
            left -= 1
            try:
                await self.in_thread(lambda: self.place.create(name, data))
                return
            except TakenError:
                if await self.in_thread(lambda: self.place.read(name)) == data:
                    return
                raise
            except UnavailableError:
                if not left:
                    raise
            await self.clock.sleep(RETRY_S)

    async def _pack(self) -> None:
        """Put the files of a block into one if the block after it is complete, too."""
        block, numbers = self._block, files_of(self._block)
        if self.number < files_of(block + 1)[-1]:
            return
        self._block += 1

        def pack() -> bytes | None:
            files, size_bytes = list[bytes](), 0
            for each in self._archive.files(numbers[0], numbers[-1]):
                files.append(each.data)
                size_bytes += len(each.data)
                if size_bytes > PACK_BYTES_MAX:
                    return None
            return encode_pack(each.header, files)

        try:
            if (data := await self.in_thread(pack)) is not None:
                await self._create(pack_name(block), data)
                self._obsolete[:0] = map(file_name, reversed(numbers))
        except CorruptionError as error:  # retention has deleted a part, or ``verify`` says it
            log.warning("archive.not_packed", reason=str(error))
        data = None
        await self.in_thread(_return_memory)

    def _check_files(self) -> None:
        """Raise CorruptionError if the last file is missing, or the first or last one of the newest
        base. Then the archive was deleted, or its place is not mounted any more."""
        numbers = {self.number} - {0}
        if self.base is not None:
            numbers |= {self.base.number, self.base.first_page}
        names = set(self.place.names())
        for number in numbers:
            if not names & {file_name(number), pack_name(block_of(number))}:
                raise _missing("a file of the archive is missing", name=file_name(number))

    def _find_obsolete(self, *, expires: bool) -> None:
        """Find the files that are in a pack, and the next block to pack. ``expires``: also the
        files that only points older than the retention need."""
        kept_ms = self.clock.wall_ms() - self.retention_s * 1000
        bases = self._archive.bases() if expires else ()
        first = next((base.first_page for base in bases if base.time_ms <= kept_ms), 0)
        stored = self._archive.stored()
        packed = {block_of(numbers[0]) for numbers, _ in stored if len(numbers) > 1}
        self._block = max(self._block, block_of(stored[0][0][0]), *(each + 1 for each in packed))
        self._obsolete = [
            name
            for numbers, name in reversed(stored)
            if numbers.stop <= first or (len(numbers) == 1 and block_of(numbers[0]) in packed)
        ]

    def _delete_obsolete(self) -> None:
        for _ in range(min(DELETED_A_ROUND, len(self._obsolete))):
            self.place.delete(self._obsolete[-1])
            self._obsolete.pop()


def _return_memory() -> None:
    """Return free memory to the system. glibc keeps buffers as large as the largest one that was
    freed, so a node kept 40 MB after some packs. Other C libraries have no such call."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _missing(message: str, **context: object) -> CorruptionError:
    cure = "Mount the place again; if the files are lost, disable the archive and enable it again"
    return CorruptionError(f"{message}. {cure}", **context)


def _is_full(records: Sequence[Record]) -> bool:
    if len(records) >= RECORDS_MAX:
        return True
    return sum(len(record.data or b"") for record in records) >= DATA_BYTES_MAX
