"""Marks under-replicated ledgers in the queue, the most urgent first.

``Marker`` writes marks as Java's auditor would. A new mark is two znodes, a directory and a leaf.
Marks of several ledgers share a transaction (rule S14), and a few transactions are in flight at a
time. If a ledger is already marked, the missing replicas are added, and the mark keeps its creation
time.

``LossMarker`` keeps the ledgers of lost and reformatted bookies marked. It looks them up in the
ledger map a slice at a time, and marks the most urgent of those found so far meanwhile. So the
first mark is written at once, however many ledgers there are, and only the first few may be out of
order. It remembers, as bitmaps, which marks exist, as long as the losses last. So a ledger that
changes during its repair is inspected but not marked again.

It also lists the marks regularly. A mark may be deleted although copies are missing. For example, a
bookie returned, a worker found the ledger healthy, and the bookie disappeared again while the
leader was paused. Or an operator deleted marks by hand. A ledger whose mark is missing in two
listings in a row is marked again. (The queue shows a repair a moment before the ledger map does.)
This happens only once for each ledger and the same losses. If Java's workers judge the ledger
differently, the leader and they would otherwise repeat it for ever.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import structlog
from prometheus_client import Counter
from pyroaring import BitMap64

from auditor.ledger_map import MappedLedger
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.underreplication import (
    BookieLosses,
    MarkQueue,
    UnderreplicatedLedger,
    find_underreplicated,
)
from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.model import BookieId
from ledgers.store import (
    Create,
    MetadataStore,
    MultiFailed,
    Operation,
    SetData,
    request_bytes,
)
from ledgers.tasks import task_scope
from replication import znodes
from replication.history import NO_HISTORY, Cause, Event, History, Kind
from replication.marks import marked_in_parts
from replication.transactions import BATCH_BYTES_MAX, BATCH_TRANSACTIONS_MAX, Batcher
from replication.znodes import Mark, MarkPaths, ensure_znode

log = structlog.get_logger()
MARKS = Counter(
    "bookmender_marks_total",
    "Marks that this node, as leader, created or extended, by cause: lost, reformatted or drained.",
    ["cause"],
)

MARKS_PER_MULTI = BATCH_TRANSACTIONS_MAX
MULTIS_AT_ONCE = 4
"""Transactions in flight for one stream of marks: enough to keep ZooKeeper busy."""
TRIES_MAX = 10
LIST_S = 60.0
LIST_PAUSE_SHARE = 20
"""The pause between two listings is also at least this many times as long as one listing takes."""

Ledgers = Sequence[UnderreplicatedLedger]
Take = Callable[[int], Awaitable[Ledgers]]
"""Hands out the next ledgers to mark, at most the given number; none at the end."""
IsRenewed = Callable[[UnderreplicatedLedger], bool]
"""Whether an existing mark of the ledger is written again: see ``Marker.mark``."""
OnMarked = Callable[[Ledgers, Ledgers], None]
"""Receives ledgers that are marked now, and those of them whose marks are new or name more
bookies."""


@dataclass
class Marker:
    """Marks ledgers through ``batcher``, whose guards prove the leadership."""

    store: MetadataStore
    batcher: Batcher
    paths: MarkPaths
    clock: Clock
    _ensuring: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Only one task creates directories at a time. If two did, each transaction could fail with
    NodeExists because of a directory that the other failed transaction did not create."""

    async def mark_all(
        self,
        ledgers: Iterable[UnderreplicatedLedger],
        *,
        is_renewed: IsRenewed = lambda _: False,
        on_marked: OnMarked = lambda ledgers, new: None,
    ) -> int:
        """Mark these ledgers in order, except that a few transactions are in flight together.
        Arguments and return value as for ``mark_stream``."""
        rest = iter(ledgers)

        async def take(count_max: int) -> Ledgers:
            return list(islice(rest, count_max))

        return await self.mark_stream(take, is_renewed=is_renewed, on_marked=on_marked)

    async def mark_stream(self, take: Take, *, is_renewed: IsRenewed, on_marked: OnMarked) -> int:
        """Mark what ``take`` hands out. Return how many marks are new or name more bookies."""

        async def mark_next() -> int:
            count, are_new = 0, True
            while part := await take(MARKS_PER_MULTI):
                # If no mark of one part was new, the next part is probably marked too, so its marks
                # are read one by one.
                new = part
                if not (are_new and await self._create_all(part)):
                    marks = (self.mark(e.ledger_id, e.lost, is_renewed=is_renewed(e)) for e in part)
                    changed = await asyncio.gather(*marks)
                    new = [each for each, is_new in zip(part, changed, strict=True) if is_new]
                are_new = len(new) > 0
                count += len(new)
                on_marked(part, new)
            return count

        async with task_scope() as scope:
            senders = [scope.start(mark_next()) for _ in range(MULTIS_AT_ONCE)]
            return sum(await asyncio.gather(*senders))

    async def mark(
        self, ledger_id: int, replicas: Collection[BookieId], *, is_renewed: bool = False
    ) -> bool:
        """Mark one ledger. Return True if the mark is new or names more bookies now.

        ``is_renewed``: write the mark even if it names all these bookies already. A worker that
        leased the ledger earlier, and is about to delete the mark, then finds another version (rule
        S6).
        """
        for _ in range(TRIES_MAX):
            try:
                return await self._try_mark(self.paths.mark(ledger_id), replicas, is_renewed)
            except (ConflictError, NoNodeError, NodeExistsError, UnknownOutcomeError):
                continue  # a worker, or Java's auditor, changed it meanwhile: read again
            except UnauthorizedError as error:  # other ledgers are not affected
                log.error("mark.access_denied", ledger_id=ledger_id, error=str(error))
                return False
        raise UnavailableError("other clients keep changing the mark", ledger_id=ledger_id)

    async def _create_all(self, ledgers: Ledgers) -> bool:
        """Create all marks in one transaction. Return True if they are known to exist now."""
        ctime_ms = self.clock.wall_ms()
        paths = [self.paths.mark(ledger.ledger_id) for ledger in ledgers]
        creations: list[Operation] = []
        for path, ledger in zip(paths, ledgers, strict=True):
            creations += _creations(path, Mark(replicas=ledger.lost, ctime_ms=ctime_ms))
        if request_bytes(creations) > BATCH_BYTES_MAX:  # the marks name very many bookies
            return False
        for _ in range(TRIES_MAX):
            try:
                await self.batcher.send(creations)
                return True
            except UnknownOutcomeError:
                return False
            except MultiFailed as failure:
                if not isinstance(failure.cause, NoNodeError):
                    return False
            try:
                await self._ensure_parents(paths)
            except (UnauthorizedError, NoNodeError):
                # An ACL denies access to some, or a worker deletes empty directories that were
                # just created: try each ledger by itself.
                return False
        return False

    async def _try_mark(self, path: str, replicas: Collection[BookieId], is_renewed: bool) -> bool:
        new = Mark(replicas=tuple(sorted(replicas)), ctime_ms=self.clock.wall_ms())
        try:
            data, stat = await self.store.get(path)
        except NoNodeError:
            directory, leaf = _creations(path, new)
            try:
                await self.batcher.apply(directory, leaf)
            except NoNodeError:  # a worker deleted the empty upper directories, or there were none
                await self._ensure_parents([path])
                raise
            except NodeExistsError:  # an empty directory was left: only the leaf is missing
                await self.batcher.apply(leaf)
            return True
        merged = _merged(data, new)
        if merged is not None or is_renewed:
            written = data if merged is None else znodes.mark_to_bytes(merged)
            await self.batcher.apply(SetData(path=path, data=written, version=stat.version))
        return merged is not None

    async def _ensure_parents(self, paths: Iterable[str]) -> None:
        """Create the three upper directories of each mark. Up to 65,536 ledgers share one."""
        async with self._ensuring:
            for parent in dict.fromkeys(path.rsplit("/", 2)[0] for path in paths):
                await self._ensure(parent)

    async def _ensure(self, directory: str) -> None:
        """Create the directory and its parents if they are missing."""
        above = directory.rpartition("/")[0]
        if above == self.paths.marks:
            # It is missing only if an operator deleted the whole queue.
            await ensure_znode(self.store, above)
        else:
            await self._ensure(above)
        with suppress(NodeExistsError):
            await self.batcher.apply(Create(path=directory))


def _creations(path: str, mark: Mark) -> tuple[Create, Create]:
    """Return the operations that create the ledger's own directory and the mark in it."""
    directory = Create(path=path.rpartition("/")[0])
    return directory, Create(path=path, data=znodes.mark_to_bytes(mark))


def _merged(data: bytes, new: Mark) -> Mark | None:
    """Return the stored mark with the missing replicas added; None if none is missing."""
    try:
        old = znodes.parse_mark(data)
    except CorruptionError:  # unreadable for Java too: replace it
        return new
    added = tuple(bookie for bookie in new.replicas if bookie not in old.replicas)
    if not added:
        return None
    ctime_ms = new.ctime_ms if old.ctime_ms is None else old.ctime_ms
    return Mark(replicas=(*old.replicas, *added), ctime_ms=ctime_ms)


# --- The ledgers of lost and reformatted bookies --------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Audit:
    """One audit of the ledgers that miss copies, and its result. ``take`` hands out those whose
    marks are not known to exist."""

    slices: Iterator[Sequence[tuple[MappedLedger, UnderreplicatedLedger]]]
    """The ledgers that miss copies, from ``find_underreplicated``."""
    queue: MarkQueue
    is_marked: Callable[[UnderreplicatedLedger], bool]
    """Returns True if the ledger needs no mark."""
    is_over: Callable[[], bool]
    is_all_found: bool = False
    is_complete: bool = True
    """False if the audit was ended before all ledgers were inspected."""
    underreplicated_count: int = 0
    underreplicated_bytes: int = 0
    """Payload bytes of these ledgers, each counted once."""
    mark_count: int = 0

    async def take(self, count_max: int) -> Ledgers:
        """Look up the next slice, and return the most urgent ledgers found so far. A slice is much
        larger than what is marked meanwhile, so the order is soon right for all ledgers."""
        while self.queue or not self.is_all_found:
            self.is_complete = self.is_complete and not self.is_over()
            if not self.is_complete:
                break
            found = next(self.slices, None)
            self.is_all_found = found is None
            for ledger, each in found or ():
                self.queue.add(each)
                self.underreplicated_count += 1
                self.underreplicated_bytes += ledger.length
            part: list[UnderreplicatedLedger] = []
            while self.queue and len(part) < count_max:
                each = self.queue.take()
                if not self.is_marked(each):
                    part.append(each)
            if part:
                return part
            await asyncio.sleep(0)
        return ()


@dataclass(kw_only=True)
class LossMarker:
    """Keeps the ledgers of lost and reformatted bookies marked, and writes no mark twice."""

    marker: Marker
    updater: LedgerMapUpdater
    on_gone: Callable[[Collection[int]], None]
    """Called with the ledgers whose marks disappeared and must be written again."""
    history: History = NO_HISTORY
    _losses: BookieLosses = field(default_factory=BookieLosses, init=False)
    """The losses for which the known marks were made."""
    _marked: dict[BookieId, BitMap64] = field(default_factory=dict, init=False)
    """By lost or reformatted bookie, the ledgers whose marks are known to name it."""
    _unlisted: BitMap64 = field(default_factory=BitMap64, init=False)
    """Ledgers whose marks were missing in the last listing."""
    _restored: BitMap64 = field(default_factory=BitMap64, init=False)
    """Ledgers whose marks had disappeared and were written again."""

    def update(self, losses: BookieLosses) -> None:
        """Set the losses. Forget marks that name a bookie that has returned or was lost again,
        because workers may have deleted these marks."""
        news = {bookie for bookie, *_ in losses.ids - self._losses.ids}
        if news:
            self._restored = BitMap64()
        for bookie in self._marked.keys() - (losses.bookies - news):
            self._forget(self._marked.pop(bookie))
        self._losses = losses

    def forget_all(self) -> None:
        """Forget all marks, so that the next audit reads each of them again."""
        self._marked, self._restored = {}, BitMap64()

    async def mark_naming(
        self,
        losses: BookieLosses,
        *,
        first: Collection[BookieId],
        is_over: Callable[[], bool],
        again: Collection[BookieId] = (),
    ) -> Audit:
        """Mark all ledgers that miss copies, except those whose marks are known to exist.

        ``first``: the bookies whose ledgers are marked first. ``is_over``: called now and then;
        True ends the audit early. ``again``: bookies that had returned since they were lost the
        last time; marks that name them are renewed.
        """
        audit = Audit(
            slices=find_underreplicated(self.updater.ledger_map, losses, first=first),
            queue=MarkQueue(losses.lost_since_s),
            is_marked=self._is_marked,
            is_over=is_over,
        )
        audit.mark_count = await self.marker.mark_stream(
            audit.take,
            is_renewed=lambda each: any(bookie in again for bookie in each.lost),
            on_marked=self._remember,
        )
        return audit

    async def mark_touched(self, ledger_ids: Collection[int], losses: BookieLosses) -> None:
        """Mark those of these created or changed ledgers that miss copies and are not known to be
        marked.

        A ledger that a worker has leased is marked too: the worker knows only its state before the
        change (rule S6).
        """
        found: list[UnderreplicatedLedger] = []
        for ledger_id in ledger_ids:
            ledger = self.updater.ledger_map.get(ledger_id)
            each = None if ledger is None else losses.underreplicated(ledger)
            if each is None:
                self._forget(BitMap64((ledger_id,)))
            elif not self._is_marked(each):
                found.append(each)
        await self.marker.mark_all(found, is_renewed=lambda _: True, on_marked=self._remember)

    async def run(self) -> None:
        """List the marks regularly, until cancelled. Raises SessionLostError."""
        took_s = 0.0
        while True:
            await self.marker.clock.sleep(max(LIST_S, LIST_PAUSE_SHARE * took_s))
            # In an outdated ledger map, a repaired ledger cannot be told from one that lost its
            # mark. A reformatted bookie proves nothing: its copies may have been restored.
            are_marked = self._losses.lost_since_s and any(self._marked.values())
            if not (are_marked and self.updater.is_up_to_date):
                self._unlisted = BitMap64()
                continue
            began_s = self.marker.clock.now_s()
            try:
                await self._find_gone()
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("marks.list_failed", error=str(error))
            took_s = self.marker.clock.now_s() - began_s

    async def _find_gone(self) -> None:
        """Forget the marks that two listings in a row did not contain, and call ``on_gone``."""
        listed = BitMap64()
        async for part in marked_in_parts(self.marker.store, self.marker.paths):
            listed.update(part)
        known = BitMap64().union(*self._marked.values())
        known &= self.updater.ledger_map.naming_any(self._losses.lost_since_s)
        missing = known - listed - self._restored
        unlisted = BitMap64(filter(self.updater.is_current, missing))
        gone = unlisted & self._unlisted
        self._unlisted = unlisted - gone
        if gone:
            log.warning("marks.disappeared", ledger_count=len(gone), first=list(gone)[:10])
            self._forget(gone)
            self._restored |= gone
            self.on_gone(list(gone))

    def _is_marked(self, ledger: UnderreplicatedLedger) -> bool:
        """Return True if the ledger is marked, and its mark names every lost bookie of it."""
        return all(
            bookie in self._marked and ledger.ledger_id in self._marked[bookie]
            for bookie in ledger.lost
        )

    def _forget(self, ledger_ids: BitMap64) -> None:
        for marked in self._marked.values():
            marked.difference_update(ledger_ids)

    def _remember(self, ledgers: Ledgers, new: Ledgers) -> None:
        """Remember the marks of these ledgers, and count the new ones. In the history, a ledger
        counts for each bookie that its mark names."""
        for ledger in ledgers:
            for bookie in ledger.lost:
                self._marked.setdefault(bookie, BitMap64()).add(ledger.ledger_id)
        lost = self._losses.lost_since_s
        lost_count = sum(not lost.keys().isdisjoint(ledger.lost) for ledger in new)
        MARKS.labels(cause="lost").inc(lost_count)
        MARKS.labels(cause="reformatted").inc(len(new) - lost_count)
        by_bookie = collections.Counter(bookie for ledger in new for bookie in ledger.lost)
        for bookie, count in by_bookie.items():
            cause = Cause.LOST if bookie in lost else Cause.REFORMATTED
            self.history.record(
                Event(kind=Kind.LEDGERS_MARKED, bookies=(bookie,), cause=cause, ledger_count=count)
            )
