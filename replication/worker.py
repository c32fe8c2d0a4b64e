"""The ReplicationWorker: takes ledgers from the queue, many at once, and sees each to its end.

It looks at a bounded window of the queue, takes the most endangered ledgers first, and lets
``repair`` do the work. A ledger that must wait for its grace keeps its lock but gives up its place;
one that cannot be repaired now is put aside with a reason, and tried again after a growing wait or
as soon as the bookies change. Nothing is ever tried in a hot loop.
"""

import asyncio
import random
from contextlib import aclosing

import structlog
from prometheus_client import Counter

from ledgers.clock import Clock
from ledgers.errors import LockLostError, SessionLostError, UnavailableError
from replication.cluster_view import ViewSource
from replication.deferrals import Deferrals
from replication.outcome import Outcome, OutcomeKind
from replication.plan import Reason
from replication.queue import Queue, QueuedLedger, Take
from replication.repair import Repairer
from replication.settings import ReplicationSettings
from replication.waiting import WaitingNote, WaitingNotesWriter

log = structlog.get_logger()
REPAIRS = Counter(
    "bookmender_repairs_total",
    "Ledgers a worker is finished with for now, by outcome: done, waiting or marked-again.",
    ["outcome"],
)
REPAIRED_ENTRIES = Counter(
    "bookmender_repaired_entries_total", "Entries copied to their new bookie and acknowledged."
)
REPAIRED_BYTES = Counter(
    "bookmender_repaired_bytes_total", "Stored bytes of those entries, headers included."
)

WINDOW_LEDGERS_MAX = 1_000
"""Marks read in one look at the queue."""
IDLE_WAIT_MIN_S = 0.05
"""The first wait after something happened; each further one is twice as long, up to the setting.
The marks come after what wakes us: the bookie that went, the first directory of the mark tree."""
TIDY_INTERVAL_S = 60.0
"""Between two looks for leftovers, which an idle worker takes."""
GRACES_AT_ONCE_MAX = 10_000
"""Ledgers that wait for their grace under our locks; further ones are given back and come again."""


class ReplicationWorker:
    """One session's worker. ``run`` ends only by cancellation or with the session."""

    def __init__(
        self,
        *,
        queue: Queue,
        repairer: Repairer,
        views: ViewSource,
        notes: WaitingNotesWriter,
        settings: ReplicationSettings,
        node: str,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._queue = queue
        self._repairer = repairer
        self._views = views
        self._notes = notes
        self._settings = settings
        self._node = node
        self._clock = clock
        self._rng = rng
        self._slots = asyncio.Semaphore(settings.ledgers_at_once)
        self._busy: set[int] = set()
        self._deferrals = Deferrals(
            wait_min_s=settings.retry_min_s, wait_max_s=settings.retry_max_s, rng=rng
        )
        self._noted: dict[int, tuple[Reason, str]] = {}
        """What this worker last noted of the ledgers that wait."""
        self._foreign_notes: set[int] = set()
        """Ledgers that any node had noted when we last looked."""
        self._grace_count = 0
        self._is_disabled = False
        self._tidy_due_s = 0.0
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled. Raises SessionLostError when the session is gone."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._wake_on_marks())
            tasks.create_task(self._wake_on_bookies())
            tasks.create_task(self._watch_switch())
            wait_s = IDLE_WAIT_MIN_S
            while True:
                has_found = await self._try_run_once(tasks)
                if has_found or await self._wait_idle(wait_s):
                    wait_s = IDLE_WAIT_MIN_S
                else:
                    wait_s = min(2 * wait_s, self._settings.idle_wait_s)

    async def _try_run_once(self, tasks: asyncio.TaskGroup) -> bool:
        try:
            return await self.run_once(tasks)
        except SessionLostError:
            raise
        except UnavailableError as error:
            log.warning("queue.unreadable", error=str(error))
            return False

    async def run_once(self, tasks: asyncio.TaskGroup) -> bool:
        """Look at the queue once and start on what is there; False when nothing was."""
        self._wake.clear()
        self._is_disabled = await self._queue.is_disabled()
        if self._is_disabled:
            return False
        await self._read_notes()
        passed_over = self._busy | self._deferrals.not_due(now_s=self._clock.now_s())
        queued = await self._queue.look(
            limit=WINDOW_LEDGERS_MAX, passed_over=passed_over, rng=self._rng
        )
        for ledger in queued:
            await self._slots.acquire()
            if self._is_disabled:  # what is being repaired is repaired, and nothing more is taken
                self._slots.release()
                break
            self._busy.add(ledger.ledger_id)
            tasks.create_task(self._work(ledger))
        if not queued and not self._busy:
            await self._tidy()
        return bool(queued)

    async def _work(self, queued: QueuedLedger) -> None:
        """One ledger from take to conclusion. Holds a slot, which the caller took."""
        try:
            take = await self._queue.take(queued)
            if take is not None and not await self._see_to_its_end(take):
                self._deferrals.defer(queued.ledger_id, now_s=self._clock.now_s())
                await self._queue.give_back(take)  # failing here ends the session, which does it
        finally:
            self._busy.discard(queued.ledger_id)
            self._slots.release()
            if not self._busy:
                self._wake.set()

    async def _see_to_its_end(self, take: Take) -> bool:
        """Repair, conclude; False when that was cut short and the lock may still be ours."""
        try:
            await self._conclude(take, await self._repair(take))
        except SessionLostError:
            raise
        except LockLostError:
            log.warning("lock.lost", ledger_id=take.ledger_id)
        except UnavailableError as error:
            log.warning("repair.interrupted", ledger_id=take.ledger_id, error=str(error))
            return False
        except Exception:  # one ledger's surprise must not stop the others; it is put aside, loudly
            log.exception("repair.crashed", ledger_id=take.ledger_id)
            return False
        return True

    async def _repair(self, take: Take) -> Outcome:
        outcome = await self._repairer.repair(take)
        while outcome.sighting is not None and self._grace_count < GRACES_AT_ONCE_MAX:
            self._grace_count += 1
            try:
                await self._note(take.ledger_id, outcome)
                await self._sit_out_grace()
            finally:
                self._grace_count -= 1
            outcome = await self._repairer.repair(take, outcome.sighting)
        return outcome

    async def _sit_out_grace(self) -> None:
        """Wait without a slot: the ledgers behind this one go on."""
        self._slots.release()
        try:
            await self._clock.sleep(self._settings.open_ledger_grace_s)
        finally:
            await self._slots.acquire()

    async def _conclude(self, take: Take, outcome: Outcome) -> None:
        ledger_id = take.ledger_id
        REPAIRS.labels(outcome=outcome.kind.value).inc()
        REPAIRED_ENTRIES.inc(outcome.entry_count)
        REPAIRED_BYTES.inc(outcome.entry_bytes)
        match outcome.kind:
            case OutcomeKind.DONE:
                self._deferrals.forget(ledger_id)
                await self._delete_note(ledger_id)
                log.debug(
                    "ledger.repaired",
                    ledger_id=ledger_id,
                    entry_count=outcome.entry_count,
                    entry_bytes=outcome.entry_bytes,
                )
            case OutcomeKind.MARKED_AGAIN:
                await self._queue.give_back(take)
            case OutcomeKind.WAITING:
                await self._note(ledger_id, outcome)
                wait_s = self._deferrals.defer(ledger_id, now_s=self._clock.now_s())
                await self._queue.give_back(take)
                log.debug("ledger.deferred", ledger_id=ledger_id, wait_s=round(wait_s, 1))

    async def _note(self, ledger_id: int, outcome: Outcome) -> None:
        """Tell everybody why the ledger waits, unless that has been told already."""
        assert outcome.reason is not None, outcome
        if self._noted.get(ledger_id) == (outcome.reason, outcome.detail):
            return
        self._noted[ledger_id] = (outcome.reason, outcome.detail)
        log.warning(
            "ledger.put_aside",
            ledger_id=ledger_id,
            reason=outcome.reason.value,
            detail=outcome.detail,
        )
        await self._notes.write(
            WaitingNote(
                ledger_id=ledger_id,
                reason=outcome.reason,
                detail=outcome.detail,
                node=self._node,
                since_ms=self._clock.wall_ms(),
            )
        )

    async def _delete_note(self, ledger_id: int) -> None:
        # Another node may have put it aside before us; its note costs a look only where it stands.
        if self._noted.pop(ledger_id, None) is not None or ledger_id in self._foreign_notes:
            await self._notes.delete(ledger_id)

    async def _read_notes(self) -> None:
        """Forget what we noted and another node, which was done with the ledger, has deleted."""
        self._foreign_notes = await self._notes.ledger_ids()
        for ledger_id in self._noted.keys() - self._foreign_notes - self._busy:
            del self._noted[ledger_id]

    async def _tidy(self) -> None:
        """With nothing else to do: what a repair leaves behind, ours or another's, goes."""
        if self._clock.now_s() < self._tidy_due_s:
            return
        self._tidy_due_s = self._clock.now_s() + TIDY_INTERVAL_S
        await self._queue.tidy()
        for ledger_id in await self._notes.ledger_ids():
            if not await self._queue.is_marked(ledger_id):
                self._noted.pop(ledger_id, None)
                await self._notes.delete(ledger_id)

    async def _wait_idle(self, wait_s: float) -> bool:
        """Whether something happened within that time."""
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _wake_on_marks(self) -> None:
        async with aclosing(self._queue.changes()) as changes:
            async for _ in changes:
                self._wake.set()

    async def _watch_switch(self) -> None:
        async with aclosing(self._queue.switch_changes()) as changes:
            async for _ in changes:
                self._is_disabled = await self._queue.is_disabled()
                self._wake.set()

    async def _wake_on_bookies(self) -> None:
        """A bookie that came or went may be what a ledger waited for."""
        seen = self._views.change_count
        while True:
            await self._views.wait_change(seen)
            seen = self._views.change_count
            self._deferrals.hasten()
            self._wake.set()
