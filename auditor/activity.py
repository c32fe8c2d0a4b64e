"""Whether clients are active at a bookie: the leader looks at whether its open ledgers grow.

A client that writes adds entries to an open ledger, and clients that follow it read them. So the leader asks for the
last entry of open ledgers several times a second, while copies are made or may soon be, and writes down the
outcome for all workers (``replication.cluster.activity``).

- A ledger that grew, or was created since the watch began, makes the members of its last ensemble *active*, for
  ``ACTIVE_FOR_S``.
- A bookie is *quiet* if each open ledger that names it in its last ensemble was read twice, and none grew between
  the two. One that no open ledger names is quiet at once.
- Of any other bookie nothing is known, and copies yield there.

So where there are more open ledgers than can be read in a second, bookies become quiet late, which costs time and
disturbs nobody; and a writer that resumes an old ledger may be noticed late, too, if no other client is active there.
Not noticed are clients that read closed ledgers while nobody writes. An operator who has such clients sets a limit.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import structlog

from auditor.index.keeper import IndexKeeper
from auditor.records import Records
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import SessionLostError, UnauthorizedError, UnavailableError
from ledgers.metadata import BookieId
from ledgers.operations.last_entries import LastEntry, last_entry_of
from ledgers.store import MetadataStore
from replication.cluster.activity import WRITTEN_EVERY_S, ClientActivity
from replication.cluster.cluster_view import ViewSource
from replication.cluster.membership import Half, LiveNode, live_nodes
from replication.cluster.own_state import own_path
from replication.queue.payloads import locks_path

log = structlog.get_logger()

LOOK_INTERVAL_S = 0.25
"""Between two looks at open ledgers: a writer is to be noticed within a second."""
READS_PER_LOOK = 125
BYTES_PER_LOOK = 2_500_000
"""Where entries are large fewer are read: 10 MB a second."""
ENTRY_BYTES_AT_FIRST = 64_000
"""What an entry is taken to weigh before one has been seen."""
READ_TIMEOUT_S = 1.0
ACTIVE_FOR_S = 10.0
"""A client that pauses is not gone. Shorter pauses do not change the pace of copying."""
LOCKS_INTERVAL_S = 2.0
"""Between two looks at the locks, while there are some."""
IDLE_INTERVAL_S = 5.0
"""Likewise, while nothing is copied, as far as is known."""
GO_ON_S = 60.0
"""So long after the last reason open ledgers are still looked at: more is often lost, or marked, soon after."""


class GrowthOfLedgers:
    """What was seen of open ledgers, look by look. No I/O. Times are monotonic seconds.

    Looks make *rounds*: in one, each ledger that was open when it began is read once.
    """

    def __init__(self) -> None:
        self._highest: dict[int, int] = {}
        """By ledger the highest last entry that was seen."""
        self._known: frozenset[int] | None = None
        """Open ledgers as of the last look: any other was created since. None before the first look."""
        self._left: deque[int] = deque()
        """Ledgers that are still to be read in this round."""
        self._rounds_over = 0
        self._doubted_in: dict[BookieId, int] = {}
        """By bookie the last round in which one of its ledgers grew, was read for the first time, or in vain."""
        self._active_until_s: dict[BookieId, float] = {}
        self._growing: dict[BookieId, int] = {}
        """By bookie the ledger that was seen to grow last."""

    def begin(
        self, open_ids: AbstractSet[int], *, count_max: int = READS_PER_LOOK, now_s: float
    ) -> list[int]:
        """Return the ledgers to be read in this look: those that say whether an active bookie still is, new ones, and
        the next of the round."""
        if not self._left:
            self._left.extend(sorted(open_ids, reverse=True))
            for gone in self._highest.keys() - open_ids:
                del self._highest[gone]
        again_s = now_s + ACTIVE_FOR_S / 2
        wanted = dict.fromkeys(
            ledger_id
            for bookie, ledger_id in self._growing.items()
            if ledger_id in open_ids and now_s < self._active_until_s[bookie] < again_s
        )
        new = open_ids - (self._known or frozenset())
        wanted |= dict.fromkeys(sorted(new, reverse=True)[:count_max])
        while self._left and len(wanted) < count_max:
            ledger_id = self._left.popleft()
            if ledger_id in open_ids:
                wanted[ledger_id] = None
        return list(wanted)

    def note(
        self, ledger_id: int, ensemble: Sequence[BookieId], last: int | None, *, now_s: float
    ) -> None:
        """A ledger was read: its ``last`` entry, None where its bookie did not say."""
        known = self._highest.get(ledger_id)
        if last is None or known is None:
            self._doubt(ensemble)
        if last is not None:
            self._highest[ledger_id] = last if known is None else max(known, last)
            if known is not None and last > known:
                self._note_client(ledger_id, ensemble, now_s)

    def end(
        self,
        open_ids: AbstractSet[int],
        ensemble_of: Callable[[int], Sequence[BookieId]],
        *,
        now_s: float,
    ) -> None:
        """All that ``begin`` named was read. ``open_ids``: those that are open now."""
        if self._known is not None:
            for ledger_id in open_ids - self._known:
                self._note_client(ledger_id, ensemble_of(ledger_id), now_s)
        self._known = frozenset(open_ids)
        if not self._left:
            self._rounds_over += 1

    def activity(
        self, bookies: AbstractSet[BookieId], *, copying_node_count: int, now_s: float
    ) -> ClientActivity:
        """What is known of each of these bookies now."""
        active = {b for b in bookies if self._active_until_s.get(b, now_s) > now_s}
        quiet = {b for b in bookies - active if self._is_quiet(b)}
        return ClientActivity(
            active=frozenset(active),
            quiet=frozenset(quiet),
            copying_node_count=max(1, copying_node_count),
        )

    def _is_quiet(self, bookie: BookieId) -> bool:
        """Whether a whole round has passed since the last one with a doubt."""
        return self._rounds_over > self._doubted_in.get(bookie, -1) + 1

    def _note_client(self, ledger_id: int, ensemble: Sequence[BookieId], now_s: float) -> None:
        self._doubt(ensemble)
        for bookie in ensemble:
            self._active_until_s[bookie] = now_s + ACTIVE_FOR_S
            self._growing[bookie] = ledger_id

    def _doubt(self, ensemble: Sequence[BookieId]) -> None:
        self._doubted_in |= dict.fromkeys(ensemble, self._rounds_over)


class ActivityWatch:
    """The leader's. ``run`` ends only by cancellation, with the session, or with the leadership."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        ur: str,
        keeper: IndexKeeper,
        views: ViewSource,
        bookies: Bookies,
        records: Records,
        clock: Clock,
    ) -> None:
        self._store, self._ur = store, ur
        self._keeper, self._views, self._bookies = keeper, views, bookies
        self._records, self._clock = records, clock
        self._nodes: dict[str, LiveNode | None] = {}
        self._lock_count = 0
        self._worker_count = 1
        self._entry_bytes = ENTRY_BYTES_AT_FIRST
        self._available = views.current.available
        self._last_reason_s = clock.now_s()
        """When copies were last made or to be expected, as they are when somebody begins to lead."""

    async def run(self) -> None:
        """Raises SessionLostError."""
        while True:
            seen = self._views.change_count
            await self._count()
            if self._is_expected():
                await self._watch()
            else:
                await self._views.wait_change(seen, timeout_s=IDLE_INTERVAL_S)

    def _is_expected(self) -> bool:
        """Whether copies are made, or may begin at any moment, as a bookie has just gone."""
        now_s, available = self._clock.now_s(), self._views.current.available
        if self._lock_count or self._available - available:
            self._last_reason_s = now_s
        self._available = available
        return now_s - self._last_reason_s < GO_ON_S

    async def _watch(self) -> None:
        growth = GrowthOfLedgers()
        said: ClientActivity | None = None
        said_s = counted_s = self._clock.now_s()
        while self._is_expected():
            began_s = self._clock.now_s()
            if self._keeper.is_complete:
                await self._look(growth)
            if began_s - counted_s >= LOCKS_INTERVAL_S:
                await self._count()
                counted_s = began_s
            now_s = self._clock.now_s()
            found = growth.activity(
                self._views.current.available,
                copying_node_count=min(self._worker_count, self._lock_count),
                now_s=now_s,
            )
            if found != said or now_s - said_s >= WRITTEN_EVERY_S:
                await self._say(found, said)
                said, said_s = found, now_s
            await self._clock.sleep(max(0.0, LOOK_INTERVAL_S - (self._clock.now_s() - began_s)))

    async def _look(self, growth: GrowthOfLedgers) -> None:
        index, open_ids = self._keeper.index, self._keeper.index.open_ids
        now_s = self._clock.now_s()
        count_max = max(1, min(READS_PER_LOOK, BYTES_PER_LOOK // self._entry_bytes))
        wanted = growth.begin(open_ids, count_max=count_max, now_s=now_s)
        ensembles = {ledger_id: self._ensemble(ledger_id) for ledger_id in wanted}
        found = await asyncio.gather(*(self._last(i, of) for i, of in ensembles.items()))
        for (ledger_id, ensemble), last in zip(ensembles.items(), found, strict=True):
            last_id = None if last is None else last.last_entry_id
            growth.note(ledger_id, ensemble, last_id, now_s=now_s)
        growth.end(index.open_ids, self._ensemble, now_s=now_s)
        weights = [last.stored_bytes for last in found if last is not None]
        if weights:
            self._entry_bytes = max(1, sum(weights) // len(weights))

    def _ensemble(self, ledger_id: int) -> Sequence[BookieId]:
        indexed = self._keeper.index.get(ledger_id)
        return () if indexed is None else indexed.ensembles[-1]

    async def _last(self, ledger_id: int, ensemble: Sequence[BookieId]) -> LastEntry | None:
        """As one member says, the same each time: where entries are striped, others have others."""
        start = ledger_id % max(1, len(ensemble))
        there = self._views.current.answering
        member = next((b for b in (*ensemble[start:], *ensemble[:start]) if b in there), None)
        if member is None:
            return None
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await last_entry_of(self._bookies, member, ledger_id)
        except TimeoutError:
            return None

    async def _count(self) -> None:
        """Who copies: ledgers under lock, and the workers that share them."""
        try:
            stats = [
                await self._store.exists(locks_path(ur)) for ur in (self._ur, own_path(self._ur))
            ]
            nodes = await live_nodes(self._store, self._ur, self._nodes)
        except SessionLostError:
            raise
        except (UnavailableError, UnauthorizedError) as error:
            log.debug("activity.uncounted", error=str(error))
            return
        self._lock_count = sum(stat.child_count for stat in stats if stat is not None)
        self._worker_count = sum(node.info.half is Half.WORKER for node in nodes)

    async def _say(self, found: ClientActivity, said: ClientActivity | None) -> None:
        if said is None or (found.active, found.quiet) != (said.active, said.quiet):
            log.info(
                "activity.changed", active_count=len(found.active), quiet_count=len(found.quiet)
            )
        try:
            await self._records.write_activity(found)
        except SessionLostError:
            raise
        except UnavailableError as error:
            log.debug("activity.unwritten", error=str(error))
