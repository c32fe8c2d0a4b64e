"""The verdicts of finished runs on one ledger: the last one, and earlier ones of closer levels.

A run that skipped or did not reach the ledger has no row for it. Its last verdict is then in an
earlier run.
"""

from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from auditor.fsck.results.reading import Results
from auditor.fsck.results.summary import Summary, summary_runs
from auditor.fsck.verdicts import LedgerVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PastVerdict:
    """A run's verdict on the ledger. ``later_runs``: number of runs that ended since. None of them
    checked the ledger as closely, as far as their rows still exist; those of ``later_runs_deleted``
    runs do not."""

    summary: Summary
    verdict: LedgerVerdict
    later_runs: int
    later_runs_deleted: int


def past_verdicts(folder: Path, ledger_id: int) -> list[PastVerdict]:
    """Return the verdicts, the last one first. Empty if no run with existing rows checked the
    ledger.

    Raises CorruptionError, and SettingsError if there are no results of any run.
    """
    Results.open(folder)  # raises with a helpful message if there are no results
    past: list[PastVerdict] = []
    deleted = 0
    for later_runs, run in enumerate(reversed(summary_runs(folder))):
        results = Results.open(folder, run)
        if not results.has_rows:
            deleted += 1
            continue
        if past and results.summary.level.depth <= past[-1].summary.level.depth:
            continue
        past += [
            PastVerdict(
                summary=results.summary,
                verdict=verdict,
                later_runs=later_runs,
                later_runs_deleted=deleted,
            )
            for verdict in results.verdicts(pc.field("ledger_id") == ledger_id)
        ]
    return past
