"""Client activity: the leader watches open ledgers to find the bookies that clients write to.

A client that writes adds entries to an open ledger, and clients that tail it read them. While
ledgers are copied, or may be copied soon, the leader therefore reads the last entry of open ledgers
several times per second. It publishes the result for all workers (``replication.client_activity``).
The ledgers of the change feed are left out: bookmender itself writes them.

- When a ledger grew, or was created after the watch began, the members of its last ensemble are
  *active* for ``ACTIVE_FOR_S``.
- A bookie is *quiet* when each open ledger that names it in its last ensemble was read twice
  without growing in between. A bookie that no open ledger names is quiet after the first look.
- All other bookies are *unknown*. Copies yield there as well.

With more open ledgers than one second's reads cover, bookies become quiet later. A writer that
resumes an old ledger may then also be noticed later. Clients that only read closed ledgers are
never noticed, unless another client writes to the same bookies. An operator with such clients sets
a limit (``bookmender limits``).
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import structlog

from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.records import Records
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from ledgers.reading import LastEntry, last_entry_of
from replication.client_activity import WRITTEN_EVERY_S, ClientActivity
from replication.cluster import ViewSource
from replication.nodes import LiveNode, Role, live_nodes

log = structlog.get_logger()

LOOK_INTERVAL_S = 0.25
"""Interval between two looks at open ledgers. A new writer must be noticed within a second."""
READS_PER_LOOK = 125
BYTES_PER_LOOK = 2_500_000
"""Bound on the entries read per look: with large entries fewer ledgers are read. Amounts to 10
MB/s."""
ENTRY_BYTES_AT_FIRST = 64_000
"""Assumed size of an entry until the first look."""
READ_TIMEOUT_S = 1.0
UNANSWERED_PAUSE_S = 10.0
"""A bookie that did not answer in time is not asked for this long. It would delay the next looks at
all other bookies."""
ACTIVE_FOR_S = 10.0
"""A client that pauses for less than this stays active, so that the pace of copying does not
oscillate."""
SORTED_MAX = 10_000
"""With more open ledgers a round reads them in any order, else the newest first."""
LOCKS_INTERVAL_S = 2.0
"""Interval between two counts of the ledger locks while the leader watches."""
IDLE_INTERVAL_S = 5.0
"""The same interval while no ledgers are copied."""
GO_ON_S = 60.0
"""The watch continues for this long after the last lock or loss, because more ledgers are often
marked soon after."""


class LedgerGrowth:
    """Derives client activity from the last entries of open ledgers. No I/O. Times are monotonic
    seconds.

    A *look* reads some open ledgers. A *round* is a series of looks that reads each ledger once.
    """

    def __init__(self) -> None:
        self._highest: dict[int, int] = {}
        """The highest last entry seen, by ledger id."""
        self._left: deque[int] = deque()
        """Ledgers to read in the rest of this round."""
        self._rounds_over = 0
        self._doubted_in: dict[BookieId, int] = {}
        """By bookie, the last round in which one of its ledgers grew, was read for the first time,
        or could not be read."""
        self._active_until_s: dict[BookieId, float] = {}
        self._growing: dict[BookieId, int] = {}
        """By bookie, the ledger that grew last."""

    def begin(
        self,
        open_ids: AbstractSet[int],
        new_ids: Sequence[int] = (),
        *,
        count_max: int = READS_PER_LOOK,
        now_s: float,
    ) -> list[int]:
        """Return the ledgers to read in this look, at most about ``count_max``.

        ``new_ids``: ledgers created since the last look. First come the last growing ledgers of
        bookies that would soon stop being active, then new ledgers, then the next ledgers of the
        round.
        """
        if not self._left:
            is_short = len(open_ids) <= SORTED_MAX
            self._left.extend(sorted(open_ids, reverse=True) if is_short else open_ids)
            for no_longer_open in self._highest.keys() - open_ids:
                del self._highest[no_longer_open]
        again_s = now_s + ACTIVE_FOR_S / 2
        wanted = dict.fromkeys(
            ledger_id
            for bookie, ledger_id in self._growing.items()
            if ledger_id in open_ids and now_s < self._active_until_s[bookie] < again_s
        )
        wanted |= dict.fromkeys(i for i in new_ids[-count_max:] if i in open_ids)
        while self._left and len(wanted) < count_max:
            ledger_id = self._left.popleft()
            if ledger_id in open_ids:
                wanted[ledger_id] = None
        return list(wanted)

    def add_reading(
        self, ledger_id: int, ensemble: Sequence[BookieId], last: int | None, *, now_s: float
    ) -> None:
        """Record the ``last`` entry of a ledger; None if the bookie did not answer."""
        known = self._highest.get(ledger_id)
        if last is None or known is None:
            self.doubt(ensemble)
        if last is not None:
            self._highest[ledger_id] = last if known is None else max(known, last)
            if known is not None and last > known:
                self.add_client(ledger_id, ensemble, now_s=now_s)

    def end(self) -> None:
        """Finish the look."""
        if not self._left:
            self._rounds_over += 1

    def activity(
        self, bookies: AbstractSet[BookieId], *, copying_node_count: int, now_s: float
    ) -> ClientActivity:
        """Return the current activity of these bookies."""
        active = {b for b in bookies if self._active_until_s.get(b, now_s) > now_s}
        # Quiet: a whole round has passed since the last round with a doubt.
        last = self._rounds_over - 1
        quiet = {b for b in bookies - active if self._doubted_in.get(b, -1) < last}
        return ClientActivity(
            active=frozenset(active),
            quiet=frozenset(quiet),
            copying_node_count=max(1, copying_node_count),
        )

    def add_client(self, ledger_id: int, ensemble: Sequence[BookieId], *, now_s: float) -> None:
        """Record that a client created the ledger, or added an entry to it."""
        self.doubt(ensemble)
        for bookie in ensemble:
            self._active_until_s[bookie] = now_s + ACTIVE_FOR_S
            self._growing[bookie] = ledger_id

    def doubt(self, bookies: Iterable[BookieId]) -> None:
        """Record that clients of these bookies may be active. They are not quiet in this round."""
        self._doubted_in |= dict.fromkeys(bookies, self._rounds_over)


@dataclass(kw_only=True)
class ActivityWatch:
    """Watches client activity and publishes it, on the leader."""

    updater: LedgerMapUpdater
    views: ViewSource
    bookies: Bookies
    records: Records
    clock: Clock

    def __post_init__(self) -> None:
        self._nodes: dict[str, LiveNode | None] = {}
        self._lock_count = 0
        self._worker_count = 1
        self._entry_bytes = ENTRY_BYTES_AT_FIRST
        self._opened_count: int | None = None
        """``LedgerMap.opened_count`` at the last look; None before the first."""
        self._silent_until_s: dict[BookieId, float] = {}
        """Bookies that did not answer in time, and until when they are not asked."""
        self._available = self.views.current.available
        self._last_reason_s = self.clock.now_s()
        """Time of the last copies or the last loss. Leadership begins as if a bookie had just been
        lost."""

    async def run(self) -> None:
        """Raises SessionLostError."""
        while True:
            seen = self.views.change_count
            await self._count()
            if self._is_expected():
                await self._watch()
            else:
                await self.views.wait_change(seen, timeout_s=IDLE_INTERVAL_S)

    def _is_expected(self) -> bool:
        """True while ledgers are copied, and for ``GO_ON_S`` after copies or a lost bookie."""
        now_s, available = self.clock.now_s(), self.views.current.available
        if self._lock_count or self._available - available:
            self._last_reason_s = now_s
        self._available = available
        return now_s - self._last_reason_s < GO_ON_S

    async def _watch(self) -> None:
        growth = LedgerGrowth()
        self._opened_count = None
        published: ClientActivity | None = None
        published_s = counted_s = self.clock.now_s()
        while self._is_expected():
            began_s = self.clock.now_s()
            if self.updater.is_complete:
                await self._look(growth)
            if began_s - counted_s >= LOCKS_INTERVAL_S:
                await self._count()
                counted_s = began_s
            now_s = self.clock.now_s()
            found = growth.activity(
                self.views.current.available,
                copying_node_count=min(self._worker_count, self._lock_count),
                now_s=now_s,
            )
            if found != published or now_s - published_s >= WRITTEN_EVERY_S:
                before = published and (published.active, published.quiet)
                if before != (found.active, found.quiet):
                    log.info(
                        "activity.changed",
                        active_count=len(found.active),
                        quiet_count=len(found.quiet),
                    )
                try:
                    await self.records.write(found)
                except UnavailableError as error:
                    log.debug("activity.write_failed", error=str(error))
                published, published_s = found, now_s
            await self.clock.sleep(max(0.0, LOOK_INTERVAL_S - (self.clock.now_s() - began_s)))

    async def _look(self, growth: LedgerGrowth) -> None:
        ledger_map, now_s = self.updater.ledger_map, self.clock.now_s()
        opened_count, before = ledger_map.opened_count, self._opened_count
        new_ids = [] if before is None else ledger_map.opened_since(before)
        self._opened_count = opened_count
        self._silent_until_s = {b: s for b, s in self._silent_until_s.items() if now_s < s}
        growth.doubt(self._silent_until_s)
        count_max = max(1, min(READS_PER_LOOK, BYTES_PER_LOOK // self._entry_bytes))
        wanted = growth.begin(ledger_map.open_ids, new_ids, count_max=count_max, now_s=now_s)
        ensembles = {ledger_id: self._ensemble(ledger_id) for ledger_id in wanted}
        found = await asyncio.gather(*(self._last(i, of) for i, of in ensembles.items()))
        for (ledger_id, ensemble), last in zip(ensembles.items(), found, strict=True):
            last_id = None if last is None else last.last_entry_id
            growth.add_reading(ledger_id, ensemble, last_id, now_s=now_s)
        for ledger_id in new_ids:
            growth.add_client(ledger_id, self._ensemble(ledger_id), now_s=now_s)
        growth.end()
        weights = [last.stored_bytes for last in found if last is not None]
        if weights:
            self._entry_bytes = max(1, sum(weights) // len(weights))

    def _ensemble(self, ledger_id: int) -> Sequence[BookieId]:
        ledger = self.updater.ledger_map.get(ledger_id)
        return () if ledger is None else ledger.ensembles[-1]

    async def _last(self, ledger_id: int, ensemble: Sequence[BookieId]) -> LastEntry | None:
        """Read the last entry from one member of the ensemble; None if it does not answer.

        The same member is asked each time, unless it was slow: members of a striped ensemble store
        different last entries.
        """
        start = ledger_id % max(1, len(ensemble))
        answering = self.views.current.answering - self._silent_until_s.keys()
        member = next((b for b in (*ensemble[start:], *ensemble[:start]) if b in answering), None)
        if member is None:
            return None
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await last_entry_of(self.bookies, member, ledger_id)
        except TimeoutError:
            self._silent_until_s[member] = self.clock.now_s() + UNANSWERED_PAUSE_S
            return None

    async def _count(self) -> None:
        """Count the locked ledgers and the workers."""
        store, paths = self.records.store, self.records.paths
        try:
            locks = await store.exists(paths.locks)
            nodes = await live_nodes(store, paths, self._nodes)
        except (UnavailableError, UnauthorizedError) as error:
            log.debug("activity.count_failed", error=str(error))
            return
        self._lock_count = 0 if locks is None else locks.child_count
        self._worker_count = sum(node.info.role is Role.WORKER for node in nodes)
