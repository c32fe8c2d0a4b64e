"""Reports ledgers that have been marked for too long, so that an operator finds out why they are
not repaired.

Ledgers in our private queue count only if a check or fsck found damage; drains and other orders of
operators may take their time. Java's auditor uses the time in the mark, which it sets again
whenever it adds a bookie. Ours uses the older of that time and the creation time of the znode.
"""

from collections.abc import Sequence

import structlog
from prometheus_client import Gauge

from auditor.checks import runner
from auditor.checks.records import OVERDUE, CheckRecord, CheckRecords, CheckRun
from auditor.finding_marker import read_private_queue
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
    "Ledgers that have been marked for longer than checks.overdue_after_s, as of this leader's "
    "last reading.",
)

LOOK_MIN_S, LOOK_MAX_S = 60.0, 3_600.0
LOGGED_MAX = 20
"""Ledgers named in the log. The rest is only counted."""


class OverdueMarks:
    """Reads the queue regularly and records overdue marks. It writes no marks, so nothing pauses
    it."""

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
        self._logged: frozenset[int] = frozenset()
        self._logged_unreadable: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Run until cancelled, as ``CheckRunner.run``; end at once if the setting is 0."""
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
        """Return the overdue ledgers, ascending. The age of a mark that ACLs deny access to is
        unknown: its ledger is logged, and not returned."""
        started_ms = self._clock.wall_ms()
        shared = await marked_ledger_ids(self._store, self._paths)
        private = await read_private_queue(self._store, self._paths, shared=shared)
        queues: dict[int, MarkPaths] = dict.fromkeys(shared, self._paths)
        queues |= dict.fromkeys(private.damaged, self._paths.private)
        ledger_ids = sorted(queues)
        since = await gather_in_parts(
            lambda ledger_id: self._marked_since_ms(queues[ledger_id], ledger_id),
            ledger_ids,
            at_once=READS_AT_ONCE,
        )
        limit_ms = started_ms - int(self._after_s * 1000)
        overdue: list[int] = []
        unreadable: list[int] = []
        for ledger_id, since_ms in zip(ledger_ids, since, strict=True):
            if isinstance(since_ms, UnauthorizedError):
                unreadable.append(ledger_id)
            elif since_ms is not None and since_ms < limit_ms:
                overdue.append(ledger_id)
        await self._report(overdue, unreadable, checked=ledger_ids, started_ms=started_ms)
        return overdue

    async def _marked_since_ms(
        self, queue: MarkPaths, ledger_id: int
    ) -> int | UnauthorizedError | None:
        """Return since when the ledger is marked; None if it is not marked any more; the error if
        ACLs deny access. ``queue``: root path of the queue."""
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

    async def _report(
        self,
        overdue: Sequence[int],
        unreadable: Sequence[int],
        *,
        checked: Sequence[int],
        started_ms: int,
    ) -> None:
        MARKS.set(len(overdue))
        self._log(overdue)
        self._log_unreadable(unreadable)
        now_ms = self._clock.wall_ms()
        run = CheckRun(
            started_ms=started_ms,
            finished_ms=now_ms,
            ledger_count=len(checked),
            active_ms=now_ms - started_ms,
            counts={"overdue": len(overdue), "unreadable": len(unreadable)},
        )
        runner.show_finished(OVERDUE, run)
        await self._records.write(OVERDUE, CheckRecord(last=run))

    def _log(self, overdue: Sequence[int]) -> None:
        """Log each overdue ledger once, and once when none is left."""
        new = [ledger_id for ledger_id in overdue if ledger_id not in self._logged]
        if new:
            log.error(
                "marks.overdue",
                count=len(overdue),
                new_count=len(new),
                ledger_ids=new[:LOGGED_MAX],
                after_s=self._after_s,
            )
        if self._logged and not overdue:
            log.info("marks.overdue_ended")
        self._logged = frozenset(overdue)

    def _log_unreadable(self, unreadable: Sequence[int]) -> None:
        """Log each mark that cannot be read once."""
        new = [ledger_id for ledger_id in unreadable if ledger_id not in self._logged_unreadable]
        if new:
            log.warning("marks.read_denied", count=len(unreadable), ledger_ids=new[:LOGGED_MAX])
        self._logged_unreadable = frozenset(unreadable)


def look_interval_s(after_s: float) -> float:
    """Return the interval between two readings of the whole queue: a tenth of ``after_s``, within
    bounds."""
    return min(LOOK_MAX_S, max(LOOK_MIN_S, after_s / 10))
