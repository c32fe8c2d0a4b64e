"""Whether the marks that the leader made still stand where they should.

What was marked is remembered, so that no mark is written twice (``losses``). But a mark may be gone
though its ledger misses copies still: a bookie was back, a worker found the ledger whole, and the
bookie went again, all unseen by a leader that stood still; or somebody deleted marks, and their
directories, by hand. So the queue is listed now and then, and what lacks its mark twice running (a
repair is seen in the index a moment later than in the queue) is marked again. Each ledger once for
the same losses: where Java's workers see it otherwise every time, the two shall not wear each other
out.
"""

from array import array
from collections.abc import Callable, Collection

import structlog

from auditor.index.keeper import IndexKeeper
from auditor.losses import LossMarks
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.store import MetadataStore
from replication.queue.listing import marked_in_parts

log = structlog.get_logger()

RELIST_S = 60.0
RELIST_PAUSE = 20
"""Between two listings so many times as long as one takes, at least."""


class Relisting:
    """The leader's. ``keeper``: of the index, without which what was repaired cannot be told from
    what lost its mark. ``on_gone``: told which are to be marked again."""

    def __init__(
        self,
        store: MetadataStore,
        ur: str,
        marks: LossMarks,
        clock: Clock,
        *,
        keeper: IndexKeeper,
        on_gone: Callable[[Collection[int]], None],
    ) -> None:
        self._store, self._ur = store, ur
        self._marks = marks
        self._clock = clock
        self._keeper = keeper
        self._on_gone = on_gone
        self._took_s = 0.0
        self._unlisted: frozenset[int] = frozenset()
        """Ledgers that lacked their mark at the last look."""

    async def run(self) -> None:
        """Until cancelled. Raises SessionLostError."""
        while True:
            await self._clock.sleep(max(RELIST_S, RELIST_PAUSE * self._took_s))
            if not (self._marks.are_any_known and self._keeper.is_up_to_date):
                self._unlisted = frozenset()
                continue
            try:
                await self._look()
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("marks.unlisted", error=str(error))

    async def _look(self) -> None:
        began_s = self._clock.now_s()
        listed = array("q")  # a million in 8 MB
        async for part in marked_in_parts(self._store, self._ur):
            listed.extend(part)
        lacking = await self._marks.lacking_among(listed)
        unlisted = frozenset(filter(self._keeper.is_current, lacking))
        self._took_s = self._clock.now_s() - began_s
        if gone := unlisted & self._unlisted:
            log.warning("marks.gone", ledger_count=len(gone), first=sorted(gone)[:10])
            self._marks.forget_for_once(gone)
            self._on_gone(gone)
        self._unlisted = unlisted - gone
