"""Ledgers that have been marked for too long: somebody should look why they are not repaired.

Those in our private queue count where a check or fsck found damage; what operators ordered takes its
time.

Java's auditor looks in its placement check, at the time in the mark, which it sets anew whenever it
adds a bookie. Ours goes by the older of that and the znode's own.
"""

from collections.abc import Sequence

import structlog
from prometheus_client import Gauge

from auditor.checks import runner
from auditor.checks.records import OVERDUE, CheckRecord, CheckRecords, CheckRun
from auditor.marker import read_private_queue
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import MetadataStore
from ledgers.tasks import gather_in_parts
from replication import znodes
from replication.marks import READS_AT_ONCE, marked_ledger_ids
from replication.znodes import ClusterPaths, MarkPaths

log = structlog.get_logger()
MARKS = Gauge(
    "bookmender_overdue_marks",
    "Ledgers marked for longer than checks.overdue_after_s, as this leader last saw it.",
)

LOOK_MIN_S, LOOK_MAX_S = 60.0, 3_600.0
LOGGED_MAX = 20
"""Ledgers named in the log; the counts tell of the rest."""


class OverdueMarks:
    """The leader's. Reads the queue now and then, and writes a record; marks nothing, so it never
    pauses."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        paths: ClusterPaths,
        records: CheckRecords,
        after_s: float,
        clock: Clock,
    ) -> None:
        self._store = store
        self._paths = paths
        self._records = records
        self._after_s = after_s
        self._clock = clock
        self._told: frozenset[int] = frozenset()
        self._told_unopened: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Ends at once where no mark is ever overdue; else as ``CheckRunner.run`` does."""
        if self._after_s == 0:
            return
        try:
            while True:
                await self._try_run_once()
                await self._clock.sleep(look_interval_s(self._after_s))
        finally:
            MARKS.set(0)

    async def _try_run_once(self) -> None:
        try:
            await self.run_once()
        except (UnavailableError, UnauthorizedError) as error:
            log.warning("check.failed", check=OVERDUE, error=str(error))

    async def run_once(self) -> list[int]:
        """The overdue ledgers, ascending. Of a mark that ACLs shut away nobody knows: it is told
        of, and not among them."""
        started_ms = self._clock.wall_ms()
        shared = await marked_ledger_ids(self._store, self._paths)
        own = await read_private_queue(self._store, self._paths, shared=shared)
        queues: dict[int, MarkPaths] = dict.fromkeys(shared, self._paths)
        queues |= dict.fromkeys(own.damaged, self._paths.private)
        ledger_ids = sorted(queues)
        since = await gather_in_parts(
            lambda ledger_id: self._marked_since_ms(queues[ledger_id], ledger_id),
            ledger_ids,
            at_once=READS_AT_ONCE,
        )
        limit_ms = started_ms - int(self._after_s * 1000)
        overdue: list[int] = []
        unopened: list[int] = []
        for ledger_id, since_ms in zip(ledger_ids, since, strict=True):
            if isinstance(since_ms, UnauthorizedError):
                unopened.append(ledger_id)
            elif since_ms is not None and since_ms < limit_ms:
                overdue.append(ledger_id)
        await self._tell(overdue, unopened, looked_at=ledger_ids, started_ms=started_ms)
        return overdue

    async def _marked_since_ms(
        self, queue: MarkPaths, ledger_id: int
    ) -> int | UnauthorizedError | None:
        """Return when the ledger was marked. None for a ledger that is not marked any more; the error where ACLs
        shut us out."""
        try:
            data, stat = await self._store.get(queue.mark(ledger_id))
            mark = znodes.parse_mark(data)
        except NoNodeError:
            return None
        except UnauthorizedError as error:
            return error
        except CorruptionError:
            return stat.ctime_ms
        return min(stat.ctime_ms, mark.ctime_ms or stat.ctime_ms)

    async def _tell(
        self,
        overdue: Sequence[int],
        unopened: Sequence[int],
        *,
        looked_at: Sequence[int],
        started_ms: int,
    ) -> None:
        MARKS.set(len(overdue))
        self._log(overdue)
        self._log_unopened(unopened)
        now_ms = self._clock.wall_ms()
        run = CheckRun(
            started_ms=started_ms,
            finished_ms=now_ms,
            ledger_count=len(looked_at),
            active_ms=now_ms - started_ms,
            counts={"overdue": len(overdue), "unopened": len(unopened)},
        )
        runner.show_finished(OVERDUE, run)
        await self._records.write(OVERDUE, CheckRecord(last=run))

    def _log(self, overdue: Sequence[int]) -> None:
        """Once of each ledger, not at each look, nor when others are repaired; and when none is
        left."""
        new = [ledger_id for ledger_id in overdue if ledger_id not in self._told]
        if new:
            log.error(
                "marks.overdue",
                count=len(overdue),
                new_count=len(new),
                ledger_ids=new[:LOGGED_MAX],
                after_s=self._after_s,
                next_step="bookmender queue list says why they wait",
            )
        if self._told and not overdue:
            log.info("marks.overdue_ended")
        self._told = frozenset(overdue)

    def _log_unopened(self, unopened: Sequence[int]) -> None:
        """Likewise once of each ledger."""
        new = [ledger_id for ledger_id in unopened if ledger_id not in self._told_unopened]
        if new:
            log.warning("marks.unopened", count=len(unopened), ledger_ids=new[:LOGGED_MAX])
        self._told_unopened = frozenset(unopened)


def look_interval_s(after_s: float) -> float:
    """A tenth of what is overdue, within bounds: the whole queue is read each time."""
    return min(LOOK_MAX_S, max(LOOK_MIN_S, after_s / 10))
