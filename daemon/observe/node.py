"""A node in observe mode: looks again and again, and tells a file, metrics and the log what it
sees."""

import json
import os
from contextlib import aclosing
from pathlib import Path

import structlog
from prometheus_client import Gauge

from auditor.observation import Absence, Observation
from daemon.observe.observing import PLANNED_MAX, Sight, open_observing
from daemon.observe.report import SHOWN_MAX, to_record
from daemon.previews import Previews
from daemon.settings import Settings
from ledgers.errors import SettingsError

log = structlog.get_logger()

WOULD_MARK = Gauge(
    "bookmender_observe_would_mark_ledgers",
    "Ledgers that a leader of ours would have marked by now, by copies left of their worst entry: 0, 1, more.",
    ["copies_left"],
)
UNMARKED = Gauge(
    "bookmender_observe_unmarked_ledgers",
    "UnderreplicatedLedger ledgers that whoever leads has not marked at all.",
)
PARTLY_MARKED = Gauge(
    "bookmender_observe_partly_marked_ledgers",
    "UnderreplicatedLedger ledgers that are marked, for fewer bookies than are lost.",
)
SURPLUS = Gauge(
    "bookmender_observe_surplus_marks", "Marks that stand and that a leader of ours would not make."
)
OWN_DAMAGED = Gauge(
    "bookmender_observe_own_damaged_ledgers",
    "Ledgers marked in our private queue with damage that Java's workers do not see.",
)
LOST_BOOKIES = Gauge(
    "bookmender_observe_lost_bookies", "Bookies that are lost, as a leader of ours sees it."
)
LOST_BYTES = Gauge(
    "bookmender_observe_lost_bytes", "About what the lost copies of endangered ledgers weigh."
)
HELD = Gauge("bookmender_observe_held", "1 while a leader of ours would hold, or a hold stands.")

REPORT_NAME = "observe.json"


class ReportFile:
    """The last look, in one file that is never half written."""

    def __init__(self, folder: Path) -> None:
        """Raises SettingsError when nothing can be written there."""
        self.path = folder / REPORT_NAME
        self._new = self.path.with_suffix(".new")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._new.touch()
        except OSError as error:
            raise SettingsError(
                f"node.state_dir: {folder} cannot be written to ({error.strerror})",
                setting="node.state_dir",
            ) from error

    def write(self, record: dict[str, object]) -> None:
        """A disk that is full costs this report, and not the node."""
        try:
            self._new.write_text(json.dumps(record, indent=2) + "\n")
            os.replace(self._new, self.path)
        except OSError as error:
            log.error("observe.report_failed", path=str(self.path), error=error.strerror)


class Teller:
    """Says what is seen: to the file and the metrics each time, to the log when it is new."""

    def __init__(self, report: ReportFile) -> None:
        self._report = report
        self._told: dict[str, dict[str, object]] = {}

    def tell(self, sight: Sight) -> None:
        self._report.write(to_record(sight))
        _set_metrics(sight.observation)
        self._log("observe.would_mark", _mark_fields(sight.observation))
        self._log("observe.would_repair", _repair_fields(sight.plan))

    def _log(self, event: str, fields: dict[str, object]) -> None:
        if self._told.get(event) != fields:
            self._told[event] = fields
            log.info(event, **fields)


async def run_observer_session(settings: Settings, report: ReportFile) -> None:
    """Look until the session ends."""
    teller = Teller(report)
    async with open_observing(settings) as observing:
        log.info("session.opened", role="observer")
        async with aclosing(observing.looks(planned_max=PLANNED_MAX)) as sights:
            async for sight in sights:
                teller.tell(sight)


def _set_metrics(seen: Observation) -> None:
    by_left = {"0": 0, "1": 0, "more": 0}
    for each in seen.would_mark:
        by_left[str(each.copies_left) if each.copies_left <= 1 else "more"] += 1
    for label, count in by_left.items():
        WOULD_MARK.labels(copies_left=label).set(count)
    UNMARKED.set(len(seen.difference.unmarked))
    PARTLY_MARKED.set(len(seen.difference.partly_marked))
    SURPLUS.set(len(seen.difference.surplus))
    OWN_DAMAGED.set(len(seen.own.damaged))
    LOST_BOOKIES.set(sum(row.absence is Absence.LOST for row in seen.missing))
    LOST_BYTES.set(seen.lost_bytes)
    HELD.set(seen.hold is not None)


def _mark_fields(seen: Observation) -> dict[str, object]:
    return {
        "ledger_count": len(seen.would_mark),
        "endangered_count": len(seen.underreplicated),
        "by_copies_left": seen.by_copies_left,
        "bookies": {row.bookie: row.absence.value for row in seen.missing[:SHOWN_MAX]},
        "unmarked_count": len(seen.difference.unmarked),
        "partly_marked_count": len(seen.difference.partly_marked),
        "surplus_count": len(seen.difference.surplus),
        "own_damaged_count": len(seen.own.damaged),
        "first_ledger_ids": [each.ledger_id for each in seen.underreplicated[:SHOWN_MAX]],
        "lost_bytes": seen.lost_bytes,
        "is_held": seen.hold is not None,
        "is_disabled": seen.is_disabled,
        "is_index_complete": seen.is_index_complete,
    }


def _repair_fields(plan: Previews) -> dict[str, object]:
    return {
        "planned_count": len(plan.ledgers),
        "more_count": plan.more,
        "entry_count": sum(each.entry_count for each in plan.ledgers),
        "byte_count": sum(each.byte_count for each in plan.ledgers),
        "blocked_count": sum(bool(each.plan.blocked) for each in plan.ledgers),
    }
