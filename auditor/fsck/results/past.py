"""What runs said of one ledger: the last that looked at it, and earlier ones that looked more
closely.

A ledger that a run skipped, or left, has no row there: its last verdict stands in an earlier run's.
"""

from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from auditor.fsck.results.reading import Results
from auditor.fsck.results.summary import Summary, summary_runs
from auditor.fsck.verdicts import LedgerVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PastVerdict:
    """``later_runs``: those that ended since. None of them looked at the ledger as closely, as far
    as their rows are there: of ``later_runs_deleted`` of them these are not."""

    summary: Summary
    verdict: LedgerVerdict
    later_runs: int
    later_runs_deleted: int


def past_verdicts(folder: Path, ledger_id: int) -> list[PastVerdict]:
    """The last first. Empty where no run whose rows are there looked at it.

    Raises CorruptionError, and SettingsError where there are no results of any run.
    """
    Results.open(folder)  # says what there is instead
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
