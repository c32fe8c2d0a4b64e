"""One run under way: how far it is, told in its record, in the metrics and in the log."""

import collections
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import structlog

from auditor.checks import meters
from auditor.checks.records import CheckRecord, CheckRecords, CheckRun
from ledgers.clock import Clock
from ledgers.errors import UnavailableError

log = structlog.get_logger()

WRITE_INTERVAL_S = 5.0
"""Between two writes of how far a run is. A new leader goes over what was done since once more."""
LOG_INTERVAL_S = 60.0


class Progress:
    """Of one run. ``record`` is what is told; it is written now and then, and whenever a pause
    changes."""

    def __init__(
        self, check: str, record: CheckRecord, *, records: CheckRecords, clock: Clock
    ) -> None:
        assert record.running is not None, record
        self._check = check
        self._records = records
        self._clock = clock
        self.record = record
        self._written_s = -inf
        self._logged_s = clock.now_s()

    @property
    def run(self) -> CheckRun:
        assert self.record.running is not None
        return self.record.running

    async def advance(
        self, part: Sequence[int], counts: collections.Counter[str], *, ledgers_left: int, took_s: float
    ) -> None:
        """These ledgers were looked at. Raises SessionLostError, LeadershipLostError."""
        run = self.run
        self._change(
            replace(
                run,
                cursor=part[-1] + 1,
                ledger_count=run.ledger_count + len(part),
                ledgers_left=ledgers_left,
                active_ms=run.active_ms + int(took_s * 1000),
                counts=dict(collections.Counter(run.counts) + counts),
            )
        )
        meters.show_running(self._check, self.run, looked_at=len(part))
        now_s = self._clock.now_s()
        if now_s - self._written_s >= WRITE_INTERVAL_S:
            await self._write()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            self._log("check.progressed")

    async def note_pause(self, pause: str) -> None:
        """Empty: it goes on. Raises as ``advance`` does."""
        if pause == self.run.pause:
            return
        self._change(replace(self.run, pause=pause))
        meters.show_running(self._check, self.run)
        log.info("check.paused" if pause else "check.resumed", check=self._check, why=pause)
        await self._write()

    def _change(self, run: CheckRun) -> None:
        self.record = replace(self.record, running=run)

    async def _write(self) -> None:
        self._written_s = self._clock.now_s()
        try:
            await self._records.write(self._check, self.record)
        except UnavailableError as error:  # it is a help, no more: the next write tells all of it
            log.warning("check.progress_unwritten", check=self._check, error=str(error))

    def _log(self, event: str) -> None:
        run = self.run
        log.info(
            event,
            check=self._check,
            ledger_count=run.ledger_count,
            ledgers_left=run.ledgers_left,
            ledgers_per_s=round(run.ledgers_per_s or 0.0, 1),
            remaining_s=round(run.remaining_s or 0.0),
            counts=dict(run.counts),
        )
