"""Compares two runs: ledgers whose verdict changed, that are new, or that are absent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from auditor.fsck.results.reading import Results
from auditor.fsck.results.summary import summary_runs
from auditor.fsck.verdicts import Grade
from ledgers.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One run's verdict on a ledger. ``is_wrong`` can also be True at a good grade, if copies
    differ."""

    grade: Grade
    is_wrong: bool

    @property
    def badness(self) -> tuple[bool, int]:
        """The sort key: the greater, the worse."""
        return self.is_wrong, -self.grade.rank


FINE = Said(grade=Grade.WHOLE, is_wrong=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The verdicts on one ledger; None for a run that has none."""

    ledger_id: int
    before: Said | None
    after: Said | None

    @property
    def is_worse(self) -> bool:
        """True if the ledger is worse than before; if it is new, worse than a whole one."""
        return self.after is not None and self.after.badness > (self.before or FINE).badness


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The differences, by ledger id. New and absent ledgers that are, or were, fine are only
    counted.

    ``is_newness_told``: True if the earlier run checked all ledgers. Then a ledger without a
    verdict in it is new; else that run may have left it out. ``is_absence_told``: True if the later
    run checked all ledgers, so that a ledger without a verdict in it is deleted.
    """

    changed: Sequence[Change]
    new: Sequence[Change]
    new_fine_count: int
    absent: Sequence[Change]
    absent_fine_count: int
    is_newness_told: bool
    is_absence_told: bool

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
        is_newness_told=_is_of_all(before),
        is_absence_told=_is_of_all(after),
    )


def _is_of_all(results: Results) -> bool:
    return results.summary.skipped == 0 and results.summary.left == 0


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
        else f"compare it with {other.folder}@{other.summary.run} (level {other.summary.level.value})"
    )
    return (
        f"run {after.summary.run} (level {level.value}) looked less closely than run {run} "
        f"(level {before.summary.level.value}), so that it cannot tell what became better: {advice}"
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
        Change(ledger_id=row["ledger_id"], before=_said(row, "_0"), after=_said(row, "_1"))
        for row in rows.to_pylist()
    ]


def _said(row: dict[str, Any], suffix: str) -> Said | None:
    verdict = row[f"verdict{suffix}"]
    return (
        None if verdict is None else Said(grade=Grade(verdict), is_wrong=row[f"is_wrong{suffix}"])
    )
