"""Publishing under-replicated ledgers, in the order given, as Java's auditor would mark them.

A new mark is {directory, leaf}; those of many ledgers share a multi (rule S14), a few of which are
under way. A ledger that is marked already gets the replicas it does not name yet, and keeps the
time of its first mark.

Finds the ledgers of lost bookies in the index, and marks them, the most endangered first.

The ledgers are looked up a slice at a time, and the most endangered of those found so far are
marked meanwhile. So the first mark is written at once, however many ledgers there are. Only the
first few may be out of order. The leader remembers what it marked as long as the bookies are
missing. So a ledger that changes while workers repair it is inspected, but not marked again.

Whether the marks that the leader made still stand where they should.

What was marked is remembered, so that no mark is written twice (``losses``). But a mark may be gone
though its ledger misses copies still: a bookie was back, a worker found the ledger whole, and the
bookie went again, all unseen by a leader that stood still; or somebody deleted marks, and their
directories, by hand. So the queue is listed now and then, and what lacks its mark twice running (a
repair is seen in the index a moment later than in the queue) is marked again. Each ledger once for
the same losses: where Java's workers see it otherwise every time, the two shall not wear each other
out.

What stands in our private queue alone, where Java's workers do not look.

Damage that they would find whole, as a check or fsck found it (``java_visibility``), is told from what
operators ordered: ledgers of draining bookies, and repairs by hand, that may well be whole.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import structlog
from prometheus_client import Counter

from auditor.findings import read_findings
from auditor.ledger_map import LedgerMap
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.underreplication import MarkQueue, Missing, Sight, UnderreplicatedLedger
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
from replication.marks import marked_in_parts, marked_ledger_ids
from replication.transactions import BATCH_BYTES_MAX, BATCH_TRANSACTIONS_MAX, Batcher
from replication.znodes import ClusterPaths, Mark, MarkPaths, ensure_znode

log = structlog.get_logger()

MARKS_PER_MULTI = BATCH_TRANSACTIONS_MAX
MULTIS_AT_ONCE = 4
"""Of one stream of marks: enough to keep ZooKeeper busy, whose latency the store's window heeds."""
TRIES_MAX = 10


class MarkSource(Protocol):
    """Ledgers to be marked, one after the other."""

    async def take(self, count_max: int) -> Sequence[UnderreplicatedLedger]:
        """The next ones, at least one; none when there are no more."""
        ...

    def is_renewed(self, ledger: UnderreplicatedLedger) -> bool:
        """As in ``Marker.mark``."""
        ...

    def done(
        self, ledgers: Sequence[UnderreplicatedLedger], *, new: Sequence[UnderreplicatedLedger]
    ) -> None:
        """Of a ``take``: their marks stand now. ``new``: those whose marks are, or grew."""
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
        """Directories are made by one at a time: what another one's multi made, and NodeExists told
        us of, is not there before that multi was sent again without us."""
        self._ensured_count = 0
        """How often that was done."""

    async def mark_all(self, ledgers: Sequence[UnderreplicatedLedger]) -> int:
        """Mark in order, but for the few multis that are under way together; returns how many marks
        were new or grew.
        """
        return await self.mark_stream(_Listed(iter(ledgers)))

    async def mark_stream(self, source: MarkSource) -> int:
        """Likewise, as they come, a few multis under way."""
        async with task_scope() as scope:
            senders = [scope.start(self._mark_next(source)) for _ in range(MULTIS_AT_ONCE)]
            return sum(await asyncio.gather(*senders))

    async def mark(
        self, ledger_id: int, replicas: Collection[BookieId], *, is_renewed: bool = False
    ) -> bool:
        """Whether the mark is new or names more replicas now.

        ``is_renewed``: written also where it says all that already, for a worker that has the
        ledger in hand as it was before, and is about to unmark it: it will find another version
        (rule S6).
        """
        for _ in range(TRIES_MAX):
            try:
                return await self._try_mark(ledger_id, replicas, is_renewed=is_renewed)
            except (ConflictError, NoNodeError, NodeExistsError, UnknownOutcomeError):
                continue  # a worker, or Java's auditor, changed it meanwhile: look again
            except UnauthorizedError as error:  # only this one's ledger is in doubt
                log.error("mark.access_denied", ledger_id=ledger_id, error=str(error))
                return False
        raise UnavailableError("the mark keeps changing under our hands", ledger_id=ledger_id)

    # --- Many together -----------------------------------------------------------------------------

    async def _mark_next(self, source: MarkSource) -> int:
        """Until there are no more. Where one part was marked already the next is thought to be,
        too."""
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
        """Those whose marks are new, or grew."""
        changed = await asyncio.gather(
            *(
                self.mark(each.ledger_id, each.lost, is_renewed=source.is_renewed(each))
                for each in ledgers
            )
        )
        return [each for each, is_new in zip(ledgers, changed, strict=True) if is_new]

    async def _create_all(self, ledgers: Sequence[UnderreplicatedLedger]) -> bool:
        """Whether they were all marked, in one multi; if not, none was, or nobody knows."""
        ctime_ms = self._clock.wall_ms()
        creations: list[Operation] = []
        for ledger in ledgers:
            new = Mark(replicas=ledger.lost, ctime_ms=ctime_ms)
            creations += _creations(self._paths.mark(ledger.ledger_id), new)
        if request_bytes(creations) > BATCH_BYTES_MAX:  # each names very many bookies
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
                    # Some are shut away, or a worker tidies away what we make: each is tried by
                    # itself.
                    return False
            else:
                return True
        return False

    async def _ensure_parents(
        self, ledgers: Sequence[UnderreplicatedLedger], *, unless_since: int
    ) -> None:
        """The three upper directories, shared by up to 65,536 ledgers each.

        ``unless_since``: as ``_ensured_count`` was when they lacked; what somebody made since may
        be them.
        """
        async with self._ensuring:
            if self._ensured_count == unless_since:
                paths = (self._paths.mark(ledger.ledger_id) for ledger in ledgers)
                for parent in dict.fromkeys(path.rsplit("/", 2)[0] for path in paths):
                    await self._ensure(parent)
                self._ensured_count += 1

    # --- One ---------------------------------------------------------------------------------------

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
        except NoNodeError:  # a worker tidied the upper directories away, or nobody made them yet
            async with self._ensuring:
                await self._ensure(directory.path.rpartition("/")[0])
            raise
        except NodeExistsError:  # an empty directory, left behind: the leaf alone is missing
            await self._batcher.apply(leaf)

    async def _ensure(self, directory: str) -> None:
        """Create the directory and those above it, unless they are there."""
        above = directory.rpartition("/")[0]
        if above == self._paths.marks:
            await ensure_znode(
                self._store, above
            )  # missing only if an operator deleted the whole queue
        else:
            await self._ensure(above)
        with suppress(NodeExistsError):
            await self._batcher.apply(Create(path=directory))


class BothQueues:
    """Marks where it helps: in the shared queue what Java's workers see, in our own what they would
    find whole."""

    def __init__(
        self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths, clock: Clock
    ) -> None:
        self._shared = Marker(store, batcher, paths, clock)
        self._own = Marker(store, batcher, paths.private, clock)

    async def mark(self, ledger_id: int, sight: Sight) -> bool:
        """Whether a mark is new or names more replicas now. Raises UnavailableError.

        Our own comes first: whoever unmarks the shared one meanwhile leaves that.
        """
        is_news = False
        if sight.needs_own_mark:
            is_news = await self._own.mark(ledger_id, sight.unseen)
        if sight.seen:
            is_news |= await self._shared.mark(ledger_id, sight.seen)
        return is_news


class _Listed:
    """A source that is a list."""

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
    """The ledger's own directory, and the mark in it."""
    directory = Create(path=path.rpartition("/")[0])
    return directory, Create(path=path, data=znodes.mark_to_bytes(mark))


def _merged(data: bytes, new: Mark) -> Mark | None:
    """The mark with the replicas it lacks; None when it lacks none. Its first time stays."""
    try:
        old = znodes.parse_mark(data)
    except CorruptionError:  # nobody can read it: better a good mark than none
        return new
    added = tuple(bookie for bookie in new.replicas if bookie not in old.replicas)
    if not added:
        return None
    ctime_ms = new.ctime_ms if old.ctime_ms is None else old.ctime_ms
    return Mark(replicas=(*old.replicas, *added), ctime_ms=ctime_ms)


MARKS = Counter(
    "bookmender_marks_total",
    "Marks made or extended by this node as leader, by cause: lost, reformatted (reformatted), drained.",
    ["cause"],
)

SLICE = 500
"""Ledgers looked up in one go, which takes some milliseconds."""
TOUCHED_AT_ONCE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """Result of an audit. ``is_whole``: True if all ledgers were inspected. ``urgent``: as in
    ``MarkQueue``."""

    endangered_count: int
    mark_count: int
    urgent: Sequence[int]
    is_whole: bool


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

    def name_all_of(self, ledger: UnderreplicatedLedger) -> bool:
        """Return True if the ledger is marked, and its mark names every lost bookie of it."""
        named = self._named.get(ledger.ledger_id, ())
        return all(bookie in named for bookie in ledger.lost)


class LossMarks:
    """Marks the ledgers of missing bookies, and remembers the marks, to write none twice."""

    def __init__(self, ledger_map: LedgerMap, marker: Marker) -> None:
        self._ledger_map = ledger_map
        self._marker = marker
        self._known = KnownMarks()
        self._missing = Missing()
        """The missing bookies for which the known marks were made."""
        self._restored: frozenset[int] = frozenset()
        """Ledgers whose marks had disappeared and were written again."""

    async def mark_naming(
        self,
        missing: Missing,
        *,
        first: Collection[BookieId],
        is_over: Callable[[], bool],
        again: Collection[BookieId] = (),
    ) -> Marked:
        """Mark all ledgers that miss copies, except those whose marks are known to exist.

        ``first``: the missing bookies whose ledgers are marked first. ``is_over``: called now and
        then; True ends the audit early. ``again``: bookies that had returned since they were lost
        the last time, whose old marks are renewed.
        """
        stream = MarkStream(
            self._ledger_map, missing, first=first, known=self._known, is_over=is_over, again=again
        )
        await self._marker.mark_stream(stream)
        return stream.result()

    async def mark_touched(self, ledger_ids: Collection[int], missing: Missing) -> int:
        """Mark those of these created or changed ledgers that miss copies and are not known to be
        marked. Return the number of new marks.

        A ledger that a worker has leased is marked too: the worker knows only its state before the
        change (rule S6).
        """
        looked_at = (self._look(ledger_id, missing) for ledger_id in ledger_ids)
        found = [each for each in looked_at if each is not None]
        count = 0
        for start in range(0, len(found), TOUCHED_AT_ONCE):
            part = found[start : start + TOUCHED_AT_ONCE]
            changed = await asyncio.gather(
                *(self._marker.mark(each.ledger_id, each.lost, is_renewed=True) for each in part)
            )
            self._known.add(part)
            new = [each for each, is_new in zip(part, changed, strict=True) if is_new]
            _count(new, missing)
            count += len(new)
        return count

    def see(self, missing: Missing) -> None:
        """Forget marks for bookies that have returned, or are missing again: workers may have
        completed these ledgers."""
        if news := {bookie for bookie, *_ in missing.causes - self._missing.causes}:
            self._restored = frozenset()
        self._known.keep_only(missing.bookies - news)
        self._missing = missing

    def forget(self) -> None:
        """Forget all marks, so that the next audit reads each of them again."""
        self._known = KnownMarks()
        self._restored = frozenset()

    @property
    def are_any_known(self) -> bool:
        """True if bookies are lost and some marks are known."""
        return bool(self._missing.lost_since_s) and len(self._known) > 0

    async def lacking_among(self, listed: Sequence[int]) -> frozenset[int]:
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

    def forget_for_once(self, ledger_ids: Collection[int]) -> None:
        """Forget the marks of these ledgers, because they disappeared. The next audit marks the
        ledgers again."""
        for ledger_id in ledger_ids:
            self._known.discard(ledger_id)
        self._restored = self._restored.union(ledger_ids)

    def _is_lost(self, ledger_id: int) -> bool:
        """Return True if the ledger names a lost bookie. A reformatted bookie proves nothing here:
        its copies may have been restored."""
        ledger = self._ledger_map.get(ledger_id)
        return ledger is not None and not ledger.bookies.isdisjoint(self._missing.lost_since_s)

    def _look(self, ledger_id: int, missing: Missing) -> UnderreplicatedLedger | None:
        """Return None if the ledger misses no copy, or is known to be marked for all of them."""
        ledger = self._ledger_map.get(ledger_id)
        found = None if ledger is None else missing.danger(ledger)
        if found is None:
            self._known.discard(ledger_id)
            return None
        return None if self._known.name_all_of(found) else found


class MarkStream:
    """Finds ledgers that miss copies, and hands out those that are not known to be marked.

    A ``MarkSource``. Observe mode reads it to the end without marking anything.
    """

    def __init__(
        self,
        ledger_map: LedgerMap,
        missing: Missing,
        *,
        first: Collection[BookieId] = (),
        known: KnownMarks | None = None,
        is_over: Callable[[], bool] = lambda: False,
        again: Collection[BookieId] = (),
    ) -> None:
        """Arguments as for ``LossMarks.mark_naming``. ``known``: marks that need not be written."""
        self._ledger_map = ledger_map
        self._missing = missing
        bookies = [*first, *(b for b in missing.bookies if b not in first)]
        self._ledger_ids = _naming(ledger_map, bookies)
        self._known = KnownMarks() if known is None else known
        self._is_over = is_over
        self._again = frozenset(again)
        self._queue = MarkQueue(missing.lost_since_s)
        self._is_all_found = False
        self._was_ended = False
        self._found_count = 0
        self._new_count = 0

    def result(self) -> Marked:
        return Marked(
            endangered_count=self._found_count,
            mark_count=self._new_count,
            urgent=self._queue.urgent,
            is_whole=not self._was_ended,
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
        _count(new, self._missing)

    def _find_some(self) -> None:
        """Look up the next slice. It is much larger than what is marked meanwhile, so the order is
        soon right for all ledgers."""
        if self._is_all_found:
            return
        ledger_ids = list(islice(self._ledger_ids, SLICE))
        self._is_all_found = len(ledger_ids) < SLICE
        for ledger_id in ledger_ids:
            ledger = self._ledger_map.get(ledger_id)
            found = None if ledger is None else self._missing.danger(ledger)
            if found is not None:
                self._queue.add(found)
                self._found_count += 1

    def _next_unmarked(self, count_max: int) -> list[UnderreplicatedLedger]:
        part: list[UnderreplicatedLedger] = []
        while self._queue and len(part) < count_max:
            ledger = self._queue.take()
            if not self._known.name_all_of(ledger):
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


def _count(ledgers: Sequence[UnderreplicatedLedger], missing: Missing) -> None:
    lost_count = sum(
        any(bookie in missing.lost_since_s for bookie in ledger.lost) for ledger in ledgers
    )
    MARKS.labels(cause="lost").inc(lost_count)
    MARKS.labels(cause="reformatted").inc(len(ledgers) - lost_count)


RELIST_S = 60.0
RELIST_PAUSE = 20
"""Between two listings so many times as long as one takes, at least."""


class Relisting:
    """The leader's. ``updater``: of the index, without which what was repaired cannot be told from
    what lost its mark. ``on_gone``: told which are to be marked again."""

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
        self._store, self._paths = store, paths
        self._marks = marks
        self._clock = clock
        self._updater = updater
        self._on_gone = on_gone
        self._took_s = 0.0
        self._unlisted: frozenset[int] = frozenset()
        """Ledgers that lacked their mark at the last look."""

    async def run(self) -> None:
        """Until cancelled. Raises SessionLostError."""
        while True:
            await self._clock.sleep(max(RELIST_S, RELIST_PAUSE * self._took_s))
            if not (self._marks.are_any_known and self._updater.is_up_to_date):
                self._unlisted = frozenset()
                continue
            try:
                await self._look()
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("marks.unlisted", error=str(error))

    async def _look(self) -> None:
        began_s = self._clock.now_s()
        listed = array("q")  # a million in 8 MB
        async for part in marked_in_parts(self._store, self._paths):
            listed.extend(part)
        lacking = await self._marks.lacking_among(listed)
        unlisted = frozenset(filter(self._updater.is_current, lacking))
        self._took_s = self._clock.now_s() - began_s
        if gone := unlisted & self._unlisted:
            log.warning("marks.gone", ledger_count=len(gone), first=sorted(gone)[:10])
            self._marks.forget_for_once(gone)
            self._on_gone(gone)
        self._unlisted = unlisted - gone


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateQueue:
    """Ledger ids, ascending; none of them is marked in the shared queue, too."""

    damaged: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.damaged) + len(self.others)

    @property
    def ledger_ids(self) -> list[int]:
        return sorted((*self.damaged, *self.others))


async def read_private_queue(
    store: MetadataStore,
    paths: ClusterPaths,
    *,
    shared: Collection[int],
    known_damaged: Collection[int] = (),
) -> PrivateQueue:
    """``shared``: what is marked in the other queue. ``known_damaged``: by an earlier look; a
    finding stays until its mark is gone, so that these are not read again."""
    ledger_ids = set(await marked_ledger_ids(store, paths.private)).difference(shared)
    damaged = ledger_ids.intersection(known_damaged)
    findings = await read_findings(store, paths, sorted(ledger_ids - damaged))
    damaged |= {ledger_id for ledger_id, found in findings.items() if found.bookies}
    return PrivateQueue(damaged=tuple(sorted(damaged)), others=tuple(sorted(ledger_ids - damaged)))
