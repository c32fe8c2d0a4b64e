"""Reads the results of finished runs, a few columns at a time.

``Results`` is one run. ``verdict_history`` returns what runs found for one ledger. A run that
skipped or did not reach the ledger has no row for it. So the last verdict may be in an earlier run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from auditor.fsck.results.rows import SCHEMA, VERSION, VERSION_NOTE, from_table
from auditor.fsck.results.run_folder import LEDGERS, unfinished_runs
from auditor.fsck.results.summary import Summary, check_version, read_summary, summary_runs
from auditor.fsck.results.tables import read_note
from auditor.fsck.verdicts import LedgerVerdict
from ledgers.errors import SettingsError

KNOWN_MAX = 5
"""Number of runs, the last ones, that an error names if the wanted run does not exist."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one finished run."""

    folder: Path
    summary: Summary

    @classmethod
    def open(cls, folder: Path, run: str | None = None) -> "Results":
        """Return the results of ``run``, or of the last run. Raises SettingsError if there are
        none; CorruptionError."""
        try:
            return cls(folder, read_summary(folder, run))
        except FileNotFoundError as error:
            raise SettingsError(f"{folder}: {_no_results(folder, run)}") from error
        except OSError as error:
            raise SettingsError(f"{folder}: cannot be read: {error.strerror}") from error

    @classmethod
    def named(cls, name: str) -> "Results":
        """Return the results of ``DIR`` (its last run) or ``DIR@RUN`` (an earlier run). Raises
        SettingsError."""
        folder, at, run = name.rpartition("@")
        if at and not Path(name).exists():
            return cls.open(Path(folder), run)
        return cls.open(Path(name))

    def table(self, columns: Sequence[str], where: pc.Expression | None = None) -> pa.Table:
        """Return the rows for which ``where`` holds, in no order. Raises CorruptionError if the
        rows have another version, SettingsError if they were deleted."""
        return self._rows.to_table(columns=list(columns), filter=where)

    def verdicts(self, where: pc.Expression | None = None) -> Iterator[LedgerVerdict]:
        """Yield the verdicts for which ``where`` holds, with one batch at a time in memory. Raises
        as ``table``."""
        for batch in self._rows.to_batches(filter=where, batch_size=1_000):
            yield from from_table(pa.Table.from_batches([batch]))

    def wrong(self) -> Iterator[LedgerVerdict]:
        """Yield the verdicts on wrong ledgers, which need a repair or an operator."""
        return self.verdicts(pc.field("is_wrong"))

    @property
    def path(self) -> Path:
        """The folder of the run's Parquet files."""
        return self.folder / LEDGERS / f"run={self.summary.run}"

    @property
    def has_rows(self) -> bool:
        """True if the rows exist. Those of old runs may be deleted."""
        return self.path.is_dir()

    @property
    def _rows(self) -> ds.Dataset:
        if not self.has_rows:
            raise SettingsError(f"{self.path}: the rows of this run were deleted")
        for path in islice(self.path.glob("*.parquet"), 1):  # all files have one version
            check_version("rows", int(read_note(path, VERSION_NOTE)), VERSION)
        return ds.dataset(self.path, format="parquet", schema=SCHEMA)


def _no_results(folder: Path, run: str | None) -> str:
    """Return an error text that names what exists instead."""
    if run is not None:
        text = f"there are no results of the run {run}"
        known = summary_runs(folder)[-KNOWN_MAX:]
        return f"{text}; known runs: {', '.join(known)}" if known else text
    text = "there are no results of a finished fsck run"
    unfinished = next(unfinished_runs(folder), None)
    return f"{text}; the run {unfinished} is unfinished" if unfinished else text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """A run's verdict on the ledger. ``later_runs``: number of runs that ended since. None of them
    checked the ledger as closely, as far as their rows still exist; those of ``later_runs_deleted``
    runs do not."""

    summary: Summary
    verdict: LedgerVerdict
    later_runs: int
    later_runs_deleted: int


def verdict_history(folder: Path, ledger_id: int) -> list[RunVerdict]:
    """Return the verdicts, the last one first. Empty if no run with existing rows checked the
    ledger.

    Raises CorruptionError, and SettingsError if there are no results of any run.
    """
    Results.open(folder)  # raises with a helpful message if there are no results
    history: list[RunVerdict] = []
    deleted = 0
    for later_runs, run in enumerate(reversed(summary_runs(folder))):
        results = Results.open(folder, run)
        if not results.has_rows:
            deleted += 1
            continue
        if history and results.summary.level.depth <= history[-1].summary.level.depth:
            continue
        history += [
            RunVerdict(
                summary=results.summary,
                verdict=verdict,
                later_runs=later_runs,
                later_runs_deleted=deleted,
            )
            for verdict in results.verdicts(pc.field("ledger_id") == ledger_id)
        ]
    return history
