"""Two runs compared: ledgers of which something else is said, that are new, or gone."""

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
    """``is_wrong``: also of ledgers of good grade, whose copies differ."""

    grade: Grade
    is_wrong: bool

    @property
    def badness(self) -> tuple[bool, int]:
        return self.is_wrong, -self.grade.rank


FINE = Said(grade=Grade.WHOLE, is_wrong=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """``before``, ``after``: None where there is no verdict."""

    ledger_id: int
    before: Said | None
    after: Said | None

    @property
    def is_worse(self) -> bool:
        """Than it was, or, of a new one, than it should be."""
        return self.after is not None and self.after.badness > (self.before or FINE).badness


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """By id. Of new ones, and of those without a verdict any more, the ones that are, or were, fine
    are only counted.

    ``is_newness_told``: whether the earlier run looked at all that there was, so that a ledger of
    which it has no verdict is new; else it may have been left out. ``is_absence_told``: likewise
    the later one, so that such a ledger is gone.
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
    """Verdicts of the one run against those of the other.

    Raises SettingsError where the later one looked less closely: what it did not see would look
    mended.
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
    """False where there is no verdict."""
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
