"""Reads the results of finished runs, a few columns at a time, and compares runs.

``Results`` is one run. ``verdict_history`` returns what runs found for one ledger. A run that
skipped or did not reach the ledger has no row for it. So the last verdict may be in an earlier run.
``compare`` returns the ledgers whose verdict changed, that are new, or that are absent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from auditor.fsck.results.rows import SCHEMA, VERSION, VERSION_NOTE, from_table
from auditor.fsck.results.run_folder import LEDGERS, unfinished_runs
from auditor.fsck.results.summary import Summary, check_version, read_summary, summary_runs
from auditor.fsck.results.tables import read_note
from auditor.fsck.verdicts import Grade, LedgerVerdict
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

    @classmethod
    def last_two(cls, folder: Path) -> tuple["Results", "Results"]:
        """Return the results of the last two runs, the older first. Raises SettingsError."""
        runs = summary_runs(folder)
        if len(runs) < 2:
            raise SettingsError(f"{folder}: there are no results of two runs to compare")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The grade of a ledger in one run. ``is_wrong`` can also be True at a good grade, if copies
    differ."""

    grade: Grade
    is_wrong: bool

    @property
    def severity(self) -> tuple[bool, int]:
        """The sort key: the greater, the worse."""
        return self.is_wrong, -self.grade.rank


WHOLE_OUTCOME = Outcome(grade=Grade.WHOLE, is_wrong=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The verdicts on one ledger; None for a run that has none."""

    ledger_id: int
    before: Outcome | None
    after: Outcome | None

    @property
    def is_worse(self) -> bool:
        """True if the ledger is worse than before; if it is new, worse than a whole one."""
        return (
            self.after is not None and self.after.severity > (self.before or WHOLE_OUTCOME).severity
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The differences, by ledger id. New and absent ledgers that are, or were, fine are only
    counted.

    ``is_newness_certain``: True if the earlier run checked all ledgers. Then a ledger without a
    verdict in it is new; else that run may have left it out. ``is_absence_certain``: True if the
    later run checked all ledgers, so that a ledger without a verdict in it is deleted.
    """

    changed: Sequence[Change]
    new: Sequence[Change]
    new_fine_count: int
    absent: Sequence[Change]
    absent_fine_count: int
    is_newness_certain: bool
    is_absence_certain: bool

    @property
    def has_worsened(self) -> bool:
        return any(change.is_worse for change in (*self.changed, *self.new))


def compare(before: Results, after: Results) -> Changes:
    """Return how the verdicts changed.

    Raises SettingsError if the later run was less close: damage that it cannot see would look
    repaired.
    """
    if after.summary.level.depth < before.summary.level.depth:
        raise SettingsError(_less_close(before, after))
    rows = _rows(before).join(
        _rows(after), "ledger_id", join_type="full outer", left_suffix="_0", right_suffix="_1"
    )
    rows = rows.sort_by("ledger_id")
    is_new, is_absent = pc.is_null(rows["verdict_0"]), pc.is_null(rows["verdict_1"])
    was_fine, is_fine = _is_fine(rows, "_0"), _is_fine(rows, "_1")
    is_other = pc.or_(
        pc.not_equal(rows["verdict_0"], rows["verdict_1"]),
        pc.not_equal(rows["is_wrong_0"], rows["is_wrong_1"]),
    )
    return Changes(
        changed=_changes(rows.filter(is_other)),
        new=_changes(rows.filter(pc.and_(is_new, pc.invert(is_fine)))),
        new_fine_count=_count(pc.and_(is_new, is_fine)),
        absent=_changes(rows.filter(pc.and_(is_absent, pc.invert(was_fine)))),
        absent_fine_count=_count(pc.and_(is_absent, was_fine)),
        is_newness_certain=_checked_all(before),
        is_absence_certain=_checked_all(after),
    )


def _checked_all(results: Results) -> bool:
    summary = results.summary
    return summary.skipped == 0 and summary.is_complete and not summary.is_changed_only


def _less_close(before: Results, after: Results) -> str:
    level, run = after.summary.level, before.summary.run
    earlier = (
        Results.open(before.folder, name)
        for name in reversed(summary_runs(before.folder))
        if name < run
    )
    other = next(
        (each for each in earlier if each.has_rows and each.summary.level.depth <= level.depth),
        None,
    )
    advice = (
        f"run fsck again at level {before.summary.level.value}"
        if other is None
        else f"compare it with {other.folder}@{other.summary.run} (level "
        f"{other.summary.level.value})"
    )
    return (
        f"run {after.summary.run} (level {level.value}) is less close than run {run} "
        f"(level {before.summary.level.value}), so it cannot show improvements: {advice}"
    )


def _rows(results: Results) -> pa.Table:
    return results.table(["ledger_id", "verdict", "is_wrong"])


def _is_fine(rows: pa.Table, suffix: str) -> pa.ChunkedArray:
    """Return True for each row that is whole and not wrong; False without a verdict."""
    is_whole = pc.equal(rows[f"verdict{suffix}"], Grade.WHOLE.value)
    return pc.fill_null(pc.and_(is_whole, pc.invert(rows[f"is_wrong{suffix}"])), False)


def _count(are_so: pa.ChunkedArray) -> int:
    return pc.sum(are_so).as_py() or 0


def _changes(rows: pa.Table) -> list[Change]:
    return [
        Change(ledger_id=row["ledger_id"], before=_outcome(row, "_0"), after=_outcome(row, "_1"))
        for row in rows.to_pylist()
    ]


def _outcome(row: dict[str, Any], suffix: str) -> Outcome | None:
    verdict = row[f"verdict{suffix}"]
    return (
        None
        if verdict is None
        else Outcome(grade=Grade(verdict), is_wrong=row[f"is_wrong{suffix}"])
    )
