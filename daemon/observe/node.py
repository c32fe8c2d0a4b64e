"""A node in observe mode: looks repeatedly, and reports in a file, in metrics and in the log."""

import json
import tempfile
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import Gauge

from auditor.absence import Outages
from auditor.observer import BookieCondition, Observation
from daemon.observe.observing import PLANNED_MAX, Sight, open_observing
from daemon.observe.report import SHOWN_MAX, to_record
from daemon.previews import Previews
from daemon.role_state import RoleState
from daemon.settings import Settings
from ledgers.errors import SettingsError
from ledgers.plain_files import replace_file
from ledgers.tasks import in_daemon_thread

log = structlog.get_logger()

WOULD_MARK = Gauge(
    "bookmender_observe_would_mark_ledgers",
    "Ledgers that our leader would have marked by now, by copies left of their worst entry: 0, 1, "
    "more.",
    ["copies_left"],
)
GAUGES = {
    "unmarked_count": Gauge(
        "bookmender_observe_unmarked_ledgers",
        "Under-replicated ledgers without a mark.",
    ),
    "partly_marked_count": Gauge(
        "bookmender_observe_partly_marked_ledgers",
        "Under-replicated ledgers whose mark names fewer bookies than are lost.",
    ),
    "surplus_count": Gauge(
        "bookmender_observe_surplus_marks",
        "Existing marks that our leader would not make.",
    ),
    "private_damaged_count": Gauge(
        "bookmender_observe_private_damaged_ledgers",
        "Ledgers marked in our private queue with damage that Java's workers cannot detect.",
    ),
    "lost_bookie_count": Gauge(
        "bookmender_observe_lost_bookies",
        "Bookies that our leader would count as lost.",
    ),
    "lost_bytes": Gauge(
        "bookmender_observe_lost_bytes",
        "Approximate size of the lost copies of under-replicated ledgers.",
    ),
    "is_held": Gauge(
        "bookmender_observe_held",
        "1 while a safety hold is in force, or our leader would begin one.",
    ),
}
"""By the field of the log event ``observe.would_mark`` that has the same value."""


class ReportFile:
    """The last look, as JSON in the file ``observe.json``, which is replaced atomically."""

    def __init__(self, folder: Path) -> None:
        """Check the folder. Raises SettingsError if ``folder`` is not writable."""
        self.path = folder / "observe.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise SettingsError(
                f"node.state_dir: {folder} cannot be written to ({error.strerror})",
                setting="node.state_dir",
            ) from error

    def write(self, record: dict[str, object]) -> None:
        """Replace the report. A full disk is logged and does not stop the node."""
        try:
            replace_file(self.path, json.dumps(record, indent=2) + "\n")
        except OSError as error:
            log.error("observe.report_failed", path=str(self.path), error=error.strerror)


class Teller:
    """Reports each look in the file and in metrics, and changes in the log."""

    def __init__(self, report: ReportFile) -> None:
        self._report = report
        self._told: dict[str, dict[str, object]] = {}

    def tell(self, sight: Sight) -> None:
        self._report.write(to_record(sight))
        fields = _mark_fields(sight.observation)
        for name, gauge in GAUGES.items():
            gauge.set(fields[name])
        _set_would_mark(sight.observation)
        self._log("observe.would_mark", fields)
        self._log("observe.would_repair", _repair_fields(sight.plan))

    def _log(self, event: str, fields: dict[str, object]) -> None:
        if self._told.get(event) != fields:
            self._told[event] = fields
            log.info(event, **fields)


async def run_observer_session(
    settings: Settings, report: ReportFile, outages: Outages, state: RoleState
) -> None:
    """Look repeatedly until the session ends. ``state``: where it publishes what it does."""
    teller = Teller(report)
    async with open_observing(settings, outages, state) as observing:
        log.info("session.opened", role="observer")
        async with aclosing(observing.looks(planned_max=PLANNED_MAX)) as sights:
            async for sight in sights:
                await in_daemon_thread(partial(teller.tell, sight))  # it writes a file


def _set_would_mark(seen: Observation) -> None:
    by_left = {"0": 0, "1": 0, "more": 0}
    for each in seen.would_mark:
        by_left[str(each.copies_left) if each.copies_left <= 1 else "more"] += 1
    for label, count in by_left.items():
        WOULD_MARK.labels(copies_left=label).set(count)


def _mark_fields(seen: Observation) -> dict[str, Any]:
    return {
        "ledger_count": len(seen.would_mark),
        "underreplicated_count": len(seen.underreplicated),
        "by_copies_left": seen.by_copies_left,
        "bookies": {row.bookie: row.condition.value for row in seen.affected[:SHOWN_MAX]},
        "unmarked_count": len(seen.difference.unmarked),
        "partly_marked_count": len(seen.difference.partly_marked),
        "surplus_count": len(seen.difference.surplus),
        "private_damaged_count": len(seen.private.damaged),
        "first_ledger_ids": [each.ledger_id for each in seen.underreplicated[:SHOWN_MAX]],
        "lost_bookie_count": sum(row.condition is BookieCondition.LOST for row in seen.affected),
        "lost_bytes": seen.lost_bytes,
        "is_held": seen.hold is not None,
        "is_disabled": seen.is_disabled,
        "is_ledger_map_complete": seen.is_ledger_map_complete,
    }


def _repair_fields(plan: Previews) -> dict[str, object]:
    return {
        "planned_count": len(plan.ledgers),
        "more_count": plan.more,
        "entry_count": sum(each.entry_count for each in plan.ledgers),
        "byte_count": sum(each.byte_count for each in plan.ledgers),
        "blocked_count": sum(bool(each.plan.blocked) for each in plan.ledgers),
    }
