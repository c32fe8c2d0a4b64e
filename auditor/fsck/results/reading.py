"""Reads the results of one run: its summary, and rows of its Parquet files, a few columns at a
time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from auditor.fsck.results.files import read_note
from auditor.fsck.results.rows import SCHEMA, VERSION, VERSION_NOTE, from_table
from auditor.fsck.results.run_folder import LEDGERS, unfinished_runs
from auditor.fsck.results.summary import Summary, check_version, read_summary, summary_runs
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
            raise SettingsError(f"{folder}: {_none_there(folder, run)}") from error
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

    @classmethod
    def last_two(cls, folder: Path) -> tuple["Results", "Results"]:
        """Return the results of the last two runs, the older first. Raises SettingsError."""
        runs = summary_runs(folder)
        if len(runs) < 2:
            raise SettingsError(f"{folder}: there are no results of two runs to be compared")
        return cls.open(folder, runs[-2]), cls.open(folder, runs[-1])

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
        """Yield the verdicts on ledgers for which somebody must act."""
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
            raise SettingsError(f"{self.path}: is not there any more")
        for path in islice(self.path.glob("*.parquet"), 1):  # all files have one version
            check_version("rows", int(read_note(path, VERSION_NOTE)), VERSION)
        return ds.dataset(self.path, format="parquet", schema=SCHEMA)


def _none_there(folder: Path, run: str | None) -> str:
    """Return an error text that names what exists instead."""
    if run is not None:
        told = f"there are no results of the run {run}"
        known = summary_runs(folder)[-KNOWN_MAX:]
        return f"{told}; there are those of {', '.join(known)}" if known else told
    told = "there are no results of a run of fsck"
    under_way = next(unfinished_runs(folder), None)
    return f"{told}; the run {under_way} has not come to its end" if under_way else told
