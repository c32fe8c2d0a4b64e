"""Marks under-replicated ledgers in the queue, the most urgent first.

``Marker`` writes marks as Java's auditor would. A new mark is two znodes, a directory and a leaf.
Marks of several ledgers share a transaction (rule S14), and a few transactions are in flight at a
time. If a ledger is already marked, the missing replicas are added, and the mark keeps its creation
time.

``LossMarks`` finds the ledgers of lost and reformatted bookies in the ledger map, a slice at a
time. The most urgent of those found so far are marked meanwhile. So the first mark is written
at once, however many ledgers there are, and only the first few may be out of order. The leader
remembers its marks as long as the losses last, so that a ledger that changes during its repair is
inspected but not marked again.

``MarkVerifier`` checks that the remembered marks still exist. A mark may be deleted although copies
are missing. For example, a bookie returned, a worker found the ledger healthy, and the bookie
disappeared again while the leader was paused. Or an operator deleted marks by hand. A ledger whose
mark is missing in two listings in a row is marked again. (The queue shows a repair a moment before
the ledger map does.) This happens only once for each ledger and the same losses. If Java's workers
judge the ledger differently, the leader and they would otherwise repeat it for ever.
"""

import asyncio
import collections
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import structlog
from prometheus_client import Counter

from auditor.ledger_map import LedgerMap
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.underreplication import (
    BookieLosses,
    MarkQueue,
    UnderreplicatedLedger,
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
from replication.znodes import ClusterPaths, Mark, MarkPaths, ensure_znode

log = structlog.get_logger()

MARKS_PER_MULTI = BATCH_TRANSACTIONS_MAX
MULTIS_AT_ONCE = 4
"""Transactions in flight for one stream of marks: enough to keep ZooKeeper busy."""
TRIES_MAX = 10


class MarkSource(Protocol):
    """Hands out ledgers to mark."""

    async def take(self, count_max: int) -> Sequence[UnderreplicatedLedger]:
        """Return the next ledgers, at least one; none at the end."""
        ...

    def is_renewed(self, ledger: UnderreplicatedLedger) -> bool:
        """See ``Marker.mark``."""
        ...

    def done(
        self, ledgers: Sequence[UnderreplicatedLedger], *, new: Sequence[UnderreplicatedLedger]
    ) -> None:
        """Ledgers that ``take`` returned are marked now. ``new``: those whose marks are new or name
        more bookies."""
        ...


class Marker:
    """Marks ledgers through ``batcher``, whose guards prove the leadership."""

    def __init__(
        self, store: MetadataStore, batcher: Batcher, paths: MarkPaths, clock: Clock
    ) -> None:
        self._store = store
        self._batcher = batcher
        self._paths = paths
        self._clock = clock
        self._ensuring = asyncio.Lock()
        """Only one task creates directories at a time. If two did, each transaction could fail with
        NodeExists because of a directory that the other failed transaction did not create."""
        self._ensured_count = 0
        """Number of times that directories were created."""

    async def mark_all(self, ledgers: Sequence[UnderreplicatedLedger]) -> int:
        """Mark these ledgers in order, except that a few transactions are in flight together.
        Return how many marks are new or name more bookies."""
        return await self.mark_stream(_ListSource(iter(ledgers)))

    async def mark_stream(self, source: MarkSource) -> int:
        """Mark the ledgers that ``source`` hands out. Return value as for ``mark_all``."""
        async with task_scope() as scope:
            senders = [scope.start(self._mark_next(source)) for _ in range(MULTIS_AT_ONCE)]
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
                return await self._try_mark(ledger_id, replicas, is_renewed=is_renewed)
            except (ConflictError, NoNodeError, NodeExistsError, UnknownOutcomeError):
                continue  # a worker, or Java's auditor, changed it meanwhile: read again
            except UnauthorizedError as error:  # other ledgers are not affected
                log.error("mark.access_denied", ledger_id=ledger_id, error=str(error))
                return False
        raise UnavailableError("other clients keep changing the mark", ledger_id=ledger_id)

    # --- Many ledgers -----------------------------------------------------------------------------

    async def _mark_next(self, source: MarkSource) -> int:
        """Mark until the source is empty. If no mark of one part was new, the next part is probably
        marked too, so its marks are read one by one."""
        count, are_new = 0, True
        while part := await source.take(MARKS_PER_MULTI):
            if are_new and await self._create_all(part):
                new = part
            else:
                new = await self._mark_each(part, source)
            are_new = len(new) > 0
            count += len(new)
            source.done(part, new=new)
        return count

    async def _mark_each(
        self, ledgers: Sequence[UnderreplicatedLedger], source: MarkSource
    ) -> Sequence[UnderreplicatedLedger]:
        """Mark each ledger by itself. Return those whose marks are new or name more bookies."""
        changed = await asyncio.gather(
            *(
                self.mark(each.ledger_id, each.lost, is_renewed=source.is_renewed(each))
                for each in ledgers
            )
        )
        return [each for each, is_new in zip(ledgers, changed, strict=True) if is_new]

    async def _create_all(self, ledgers: Sequence[UnderreplicatedLedger]) -> bool:
        """Create all marks in one transaction. Return False if none was created, or if the outcome
        is unknown."""
        ctime_ms = self._clock.wall_ms()
        creations: list[Operation] = []
        for ledger in ledgers:
            new = Mark(replicas=ledger.lost, ctime_ms=ctime_ms)
            creations += _creations(self._paths.mark(ledger.ledger_id), new)
        if request_bytes(creations) > BATCH_BYTES_MAX:  # the marks name very many bookies
            return False
        for _ in range(TRIES_MAX):
            ensured_count = self._ensured_count
            try:
                await self._batcher.send(creations)
            except UnknownOutcomeError:
                return False
            except MultiFailed as failure:
                if not isinstance(failure.cause, NoNodeError):
                    return False
                try:
                    await self._ensure_parents(ledgers, unless_since=ensured_count)
                except (UnauthorizedError, NoNodeError):
                    # An ACL denies access to some, or a worker deletes empty directories that were
                    # just created: try each ledger by itself.
                    return False
            else:
                return True
        return False

    async def _ensure_parents(
        self, ledgers: Sequence[UnderreplicatedLedger], *, unless_since: int
    ) -> None:
        """Create the three upper directories of each mark. Up to 65,536 ledgers share one.

        ``unless_since``: ``_ensured_count`` when the directories were missing. If it has grown,
        another task may have created them.
        """
        async with self._ensuring:
            if self._ensured_count == unless_since:
                paths = (self._paths.mark(ledger.ledger_id) for ledger in ledgers)
                for parent in dict.fromkeys(path.rsplit("/", 2)[0] for path in paths):
                    await self._ensure(parent)
                self._ensured_count += 1

    # --- One ledger -------------------------------------------------------------------------------

    async def _try_mark(
        self, ledger_id: int, replicas: Collection[BookieId], *, is_renewed: bool
    ) -> bool:
        path = self._paths.mark(ledger_id)
        new = Mark(replicas=tuple(sorted(replicas)), ctime_ms=self._clock.wall_ms())
        try:
            data, stat = await self._store.get(path)
        except NoNodeError:
            await self._create(path, new)
            return True
        merged = _merged(data, new)
        if merged is not None or is_renewed:
            written = data if merged is None else znodes.mark_to_bytes(merged)
            await self._batcher.apply(SetData(path=path, data=written, version=stat.version))
        return merged is not None

    async def _create(self, path: str, new: Mark) -> None:
        directory, leaf = _creations(path, new)
        try:
            await self._batcher.apply(directory, leaf)
        except NoNodeError:  # a worker deleted the empty upper directories, or they never existed
            async with self._ensuring:
                await self._ensure(directory.path.rpartition("/")[0])
            raise
        except NodeExistsError:  # an empty directory was left: only the leaf is missing
            await self._batcher.apply(leaf)

    async def _ensure(self, directory: str) -> None:
        """Create the directory and its parents if they are missing."""
        above = directory.rpartition("/")[0]
        if above == self._paths.marks:
            # It is missing only if an operator deleted the whole queue.
            await ensure_znode(self._store, above)
        else:
            await self._ensure(above)
        with suppress(NodeExistsError):
            await self._batcher.apply(Create(path=directory))


class _ListSource:
    """A ``MarkSource`` of given ledgers."""

    def __init__(self, ledgers: Iterator[UnderreplicatedLedger]) -> None:
        self._ledgers = ledgers

    async def take(self, count_max: int) -> Sequence[UnderreplicatedLedger]:
        return list(islice(self._ledgers, count_max))

    def is_renewed(self, ledger: UnderreplicatedLedger) -> bool:
        return False

    def done(
        self, ledgers: Sequence[UnderreplicatedLedger], *, new: Sequence[UnderreplicatedLedger]
    ) -> None:
        pass


def _creations(path: str, mark: Mark) -> tuple[Create, Create]:
    """Return the operations that create the ledger's own directory and the mark in it."""
    directory = Create(path=path.rpartition("/")[0])
    return directory, Create(path=path, data=znodes.mark_to_bytes(mark))


def _merged(data: bytes, new: Mark) -> Mark | None:
    """Return the stored mark with the missing replicas added; None if none is missing. The creation
    time stays."""
    try:
        old = znodes.parse_mark(data)
    except CorruptionError:  # unreadable for Java too: replace it
        return new
    added = tuple(bookie for bookie in new.replicas if bookie not in old.replicas)
    if not added:
        return None
    ctime_ms = new.ctime_ms if old.ctime_ms is None else old.ctime_ms
    return Mark(replicas=(*old.replicas, *added), ctime_ms=ctime_ms)


MARKS = Counter(
    "bookmender_marks_total",
    "Marks that this node, as leader, created or extended, by cause: lost, reformatted or drained.",
    ["cause"],
)

SLICE = 500
"""Ledgers looked up without a pause. That takes a few milliseconds."""
TOUCHED_AT_ONCE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """Result of an audit. ``urgent``: as in ``MarkQueue``. ``is_complete``: True if all ledgers
    were inspected."""

    underreplicated_count: int
    underreplicated_bytes: int
    """Payload bytes of these ledgers, each counted once."""
    mark_count: int
    urgent: Sequence[int]
    is_complete: bool


class KnownMarks:
    """By ledger, the replicas that its mark is known to name."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[BookieId, ...]] = {}
        self._shared: dict[tuple[BookieId, ...], tuple[BookieId, ...]] = {}
        """After one loss all marks name the same bookies, so a million of them share one tuple."""

    def add(self, ledgers: Iterable[UnderreplicatedLedger]) -> None:
        for ledger in ledgers:
            self._named[ledger.ledger_id] = self._shared.setdefault(ledger.lost, ledger.lost)

    def __len__(self) -> int:
        return len(self._named)

    def ledger_ids(self) -> Sequence[int]:
        return list(self._named)

    def discard(self, ledger_id: int) -> None:
        self._named.pop(ledger_id, None)

    def keep_only(self, bookies: Collection[BookieId]) -> None:
        """Forget marks that also name other bookies."""
        shared = {named: named for named in self._shared if set(named) <= set(bookies)}
        if len(shared) == len(self._shared):  # nearly always
            return
        self._shared = shared
        self._named = {
            ledger_id: named for ledger_id, named in self._named.items() if named in self._shared
        }

    def covers(self, ledger: UnderreplicatedLedger) -> bool:
        """Return True if the ledger is marked, and its mark names every lost bookie of it."""
        named = self._named.get(ledger.ledger_id, ())
        return all(bookie in named for bookie in ledger.lost)


class LossMarks:
    """Marks the ledgers of lost and reformatted bookies. Remembers the marks, to write none
    twice."""

    def __init__(
        self, ledger_map: LedgerMap, marker: Marker, history: History = NO_HISTORY
    ) -> None:
        self._ledger_map = ledger_map
        self._marker = marker
        self._history = history
        self._known = KnownMarks()
        self._losses = BookieLosses()
        """The losses for which the known marks were made."""
        self._restored: frozenset[int] = frozenset()
        """Ledgers whose marks had disappeared and were written again."""

    async def mark_naming(
        self,
        losses: BookieLosses,
        *,
        first: Collection[BookieId],
        is_over: Callable[[], bool],
        again: Collection[BookieId] = (),
    ) -> AuditResult:
        """Mark all ledgers that miss copies, except those whose marks are known to exist.

        ``first``: the bookies whose ledgers are marked first. ``is_over``: called now and then;
        True ends the audit early. ``again``: bookies that had returned since they were lost the
        last time; marks that name them are renewed.
        """
        stream = MarkStream(
            self._ledger_map,
            losses,
            first=first,
            known=self._known,
            is_over=is_over,
            again=again,
            history=self._history,
        )
        await self._marker.mark_stream(stream)
        return stream.result()

    async def mark_touched(self, ledger_ids: Collection[int], losses: BookieLosses) -> int:
        """Mark those of these created or changed ledgers that miss copies and are not known to be
        marked. Return the number of new marks.

        A ledger that a worker has leased is marked too: the worker knows only its state before the
        change (rule S6).
        """
        inspected = (self._to_mark(ledger_id, losses) for ledger_id in ledger_ids)
        found = [each for each in inspected if each is not None]
        count = 0
        for start in range(0, len(found), TOUCHED_AT_ONCE):
            part = found[start : start + TOUCHED_AT_ONCE]
            changed = await asyncio.gather(
                *(self._marker.mark(each.ledger_id, each.lost, is_renewed=True) for each in part)
            )
            self._known.add(part)
            new = [each for each, is_new in zip(part, changed, strict=True) if is_new]
            _count(new, losses, self._history)
            count += len(new)
        return count

    def update(self, losses: BookieLosses) -> None:
        """Set the losses. Forget marks for bookies that have returned or were lost again, because
        workers may have deleted these marks."""
        if news := {bookie for bookie, *_ in losses.ids - self._losses.ids}:
            self._restored = frozenset()
        self._known.keep_only(losses.bookies - news)
        self._losses = losses

    def forget(self) -> None:
        """Forget all marks, so that the next audit reads each of them again."""
        self._known = KnownMarks()
        self._restored = frozenset()

    @property
    def are_any_known(self) -> bool:
        """True if bookies are lost and some marks are known."""
        return bool(self._losses.lost_since_s) and len(self._known) > 0

    async def unlisted_marks(self, listed: Sequence[int]) -> frozenset[int]:
        """Return the ledgers of lost bookies that are known to be marked but are not in ``listed``
        (ascending). Ledgers marked again once for the same losses are left out."""
        found = set()
        for number, ledger_id in enumerate(self._known.ledger_ids()):
            if number % SLICE == 0:
                await asyncio.sleep(0)
            place = bisect_left(listed, ledger_id)
            is_listed = place < len(listed) and listed[place] == ledger_id
            if not is_listed and ledger_id not in self._restored and self._is_lost(ledger_id):
                found.add(ledger_id)
        return frozenset(found)

    def forget_once(self, ledger_ids: Collection[int]) -> None:
        """Forget the marks of these ledgers, because they disappeared. The next audit marks the
        ledgers again."""
        for ledger_id in ledger_ids:
            self._known.discard(ledger_id)
        self._restored = self._restored.union(ledger_ids)

    def _is_lost(self, ledger_id: int) -> bool:
        """Return True if the ledger names a lost bookie. A reformatted bookie proves nothing here:
        its copies may have been restored."""
        ledger = self._ledger_map.get(ledger_id)
        return ledger is not None and not ledger.bookies.isdisjoint(self._losses.lost_since_s)

    def _to_mark(self, ledger_id: int, losses: BookieLosses) -> UnderreplicatedLedger | None:
        """Return the ledger if it lacks copies and is not known to be marked for all of them."""
        ledger = self._ledger_map.get(ledger_id)
        found = None if ledger is None else losses.underreplicated(ledger)
        if found is None:
            self._known.discard(ledger_id)
            return None
        return None if self._known.covers(found) else found


class MarkStream:
    """Finds ledgers that miss copies, and hands out those that are not known to be marked.

    A ``MarkSource``. Observe mode reads it to the end without marking anything.
    """

    def __init__(
        self,
        ledger_map: LedgerMap,
        losses: BookieLosses,
        *,
        first: Collection[BookieId] = (),
        known: KnownMarks | None = None,
        is_over: Callable[[], bool] = lambda: False,
        again: Collection[BookieId] = (),
        history: History = NO_HISTORY,
    ) -> None:
        """Arguments as for ``LossMarks.mark_naming``. ``known``: marks that need not be written."""
        self._ledger_map = ledger_map
        self._losses = losses
        bookies = [*first, *(b for b in losses.bookies if b not in first)]
        self._ledger_ids = _naming(ledger_map, bookies)
        self._known = KnownMarks() if known is None else known
        self._is_over = is_over
        self._again = frozenset(again)
        self._history = history
        self._queue = MarkQueue(losses.lost_since_s)
        self._is_all_found = False
        self._was_ended = False
        self._found_count = self._found_bytes = 0
        self._new_count = 0

    def result(self) -> AuditResult:
        return AuditResult(
            underreplicated_count=self._found_count,
            underreplicated_bytes=self._found_bytes,
            mark_count=self._new_count,
            urgent=self._queue.urgent,
            is_complete=not self._was_ended,
        )

    async def take(self, count_max: int) -> Sequence[UnderreplicatedLedger]:
        while not (self._is_all_found and not self._queue):
            self._was_ended = self._was_ended or self._is_over()
            if self._was_ended:
                return ()
            self._find_some()
            if part := self._next_unmarked(count_max):
                return part
            await asyncio.sleep(0)
        return ()

    def is_renewed(self, ledger: UnderreplicatedLedger) -> bool:
        return not self._again.isdisjoint(ledger.lost)

    def done(
        self, ledgers: Sequence[UnderreplicatedLedger], *, new: Sequence[UnderreplicatedLedger]
    ) -> None:
        self._known.add(ledgers)
        self._new_count += len(new)
        _count(new, self._losses, self._history)

    def _find_some(self) -> None:
        """Look up the next slice. It is much larger than what is marked meanwhile, so the order is
        soon right for all ledgers."""
        if self._is_all_found:
            return
        ledger_ids = list(islice(self._ledger_ids, SLICE))
        self._is_all_found = len(ledger_ids) < SLICE
        for ledger_id in ledger_ids:
            ledger = self._ledger_map.get(ledger_id)
            found = None if ledger is None else self._losses.underreplicated(ledger)
            if ledger is not None and found is not None:
                self._queue.add(found)
                self._found_count += 1
                self._found_bytes += ledger.length

    def _next_unmarked(self, count_max: int) -> list[UnderreplicatedLedger]:
        part: list[UnderreplicatedLedger] = []
        while self._queue and len(part) < count_max:
            ledger = self._queue.take()
            if not self._known.covers(ledger):
                part.append(ledger)
        return part


def _naming(ledger_map: LedgerMap, bookies: Sequence[BookieId]) -> Iterator[int]:
    """Yield each ledger that names one of the bookies, once."""
    if len(bookies) == 1:
        yield from ledger_map.naming(bookies[0])
        return
    seen: set[int] = set()
    for bookie in bookies:
        for ledger_id in ledger_map.naming(bookie):
            if ledger_id not in seen:
                seen.add(ledger_id)
                yield ledger_id


def _count(
    ledgers: Sequence[UnderreplicatedLedger], losses: BookieLosses, history: History
) -> None:
    """Count new marks. In the history, a ledger counts for each bookie that its mark names."""
    lost_count = sum(
        any(bookie in losses.lost_since_s for bookie in ledger.lost) for ledger in ledgers
    )
    MARKS.labels(cause="lost").inc(lost_count)
    MARKS.labels(cause="reformatted").inc(len(ledgers) - lost_count)
    by_bookie = collections.Counter(bookie for ledger in ledgers for bookie in ledger.lost)
    for bookie, count in by_bookie.items():
        cause = Cause.LOST if bookie in losses.lost_since_s else Cause.REFORMATTED
        history.record(
            Event(kind=Kind.LEDGERS_MARKED, bookies=(bookie,), cause=cause, ledger_count=count)
        )


LIST_S = 60.0
LIST_PAUSE_SHARE = 20
"""The pause between two listings is also at least this many times as long as one listing takes."""


class MarkVerifier:
    """Checks that the leader's marks still exist. See the top of this file."""

    def __init__(
        self,
        store: MetadataStore,
        paths: ClusterPaths,
        marks: LossMarks,
        clock: Clock,
        *,
        updater: LedgerMapUpdater,
        on_gone: Callable[[Collection[int]], None],
    ) -> None:
        """``updater``: of the ledger map. If that is outdated, a repaired ledger cannot be told
        from one that lost its mark. ``on_gone``: called with the ledgers that must be marked again.
        """
        self._store, self._paths = store, paths
        self._marks = marks
        self._clock = clock
        self._updater = updater
        self._on_gone = on_gone
        self._took_s = 0.0
        self._unlisted: frozenset[int] = frozenset()
        """Ledgers whose marks were missing in the last listing."""

    async def run(self) -> None:
        """Verify regularly, until cancelled. Raises SessionLostError."""
        while True:
            await self._clock.sleep(max(LIST_S, LIST_PAUSE_SHARE * self._took_s))
            if not (self._marks.are_any_known and self._updater.is_up_to_date):
                self._unlisted = frozenset()
                continue
            try:
                await self._verify()
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("marks.list_failed", error=str(error))

    async def _verify(self) -> None:
        began_s = self._clock.now_s()
        listed = array("q")  # a million ids take 8 MB
        async for part in marked_in_parts(self._store, self._paths):
            listed.extend(part)
        unlisted_marks = await self._marks.unlisted_marks(listed)
        unlisted = frozenset(filter(self._updater.is_current, unlisted_marks))
        self._took_s = self._clock.now_s() - began_s
        if gone := unlisted & self._unlisted:
            log.warning("marks.disappeared", ledger_count=len(gone), first=sorted(gone)[:10])
            self._marks.forget_once(gone)
            self._on_gone(gone)
        self._unlisted = unlisted - gone
