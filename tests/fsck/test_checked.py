"""The record of each ledger's last check. Pure, on rows."""

from array import array
from pathlib import Path

import pyarrow as pa
import pytest

from auditor.fsck.options import FeedChanges, Level
from auditor.fsck.results.plan import (
    CHECKED_FILE,
    after_run,
    doubtful_ledgers,
    read_checked,
    wrong_among,
)
from auditor.fsck.results.rows import replace_table, to_batch
from auditor.fsck.run import ledgers_to_check
from auditor.fsck.verdicts import Grade, LedgerVerdict
from tests.fsck.planning import NOW_MS, checked, ids, table


def verdict(ledger_id: int, grade: Grade = Grade.WHOLE, **more: object) -> LedgerVerdict:
    known: dict[str, object] = {
        "state": "closed",
        "metadata_version": 8,
        "mtime_ms": 99,
        "checked_ms": NOW_MS,
    }
    return LedgerVerdict(ledger_id=ledger_id, grade=grade, **{**known, **more})  # type: ignore[arg-type]


def test_after_a_run_each_ledger_has_its_last_check(tmp_path: Path) -> None:
    before = table(checked(1), checked(2), checked(3))
    found = pa.Table.from_batches([to_batch([verdict(2), verdict(4, Grade.LOST)])])

    after_rows = after_run(before, found, Level.FULL, listed=ids(2, 3, 4))
    replace_table(tmp_path / CHECKED_FILE, after_rows)

    after = {row.pop("ledger_id"): row for row in read_checked(tmp_path).to_pylist()}
    assert after.keys() == {2, 3, 4}  # 1 was deleted
    assert after[3]["depth"] == Level.ENDS.depth
    assert after[2] == {
        "checked_ms": NOW_MS,
        "depth": Level.FULL.depth,
        "is_wrong": False,
        "is_unknown": False,
    }
    assert after[4]["is_wrong"]


@pytest.mark.parametrize(
    ("level", "levels"),
    [
        pytest.param(Level.METADATA, {Level.METADATA, Level.ENDS}, id="less closely"),
        pytest.param(Level.ENDS, {Level.ENDS}, id="as closely"),
        pytest.param(Level.FULL, {Level.FULL}, id="more closely"),
    ],
)
def test_a_closer_check_is_kept(level: Level, levels: set[Level]) -> None:
    rows = pa.Table.from_batches([to_batch([verdict(1)])])

    after = after_run(table(checked(1)), rows, level, listed=ids(1))

    assert sorted(after["depth"].to_pylist()) == sorted(each.depth for each in levels)


@pytest.mark.parametrize(
    ("last", "level", "wrong"),
    [
        pytest.param(checked(1, is_wrong=True), Level.ENDS, 1, id="wrong at its last check"),
        pytest.param(checked(1), Level.ENDS, 0, id="fine at its last check"),
        pytest.param(checked(2, is_wrong=True), Level.ENDS, 0, id="another ledger was wrong"),
        pytest.param(
            checked(1, is_wrong=True, level=Level.FULL), Level.ENDS, 1, id="a closer check found it"
        ),
    ],
)
def test_a_wrong_ledger_left_for_the_next_run_counts(
    last: dict[str, object], level: Level, wrong: int
) -> None:
    found = pa.Table.from_batches([to_batch([verdict(2)])])
    after = after_run(table(last), found, level, listed=ids(1, 2))

    assert wrong_among(after, ids(1)) == wrong


def test_the_file_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    rows = table(checked(1), checked(2, is_wrong=True))
    written = rows.append_column("is_settled", pa.array([True, False]))

    replace_table(tmp_path / CHECKED_FILE, written)

    assert read_checked(tmp_path) == rows


def test_before_the_first_run_nothing_is_known(tmp_path: Path) -> None:
    assert read_checked(tmp_path).num_rows == 0


def test_a_run_that_did_not_list_the_ledgers_keeps_the_others() -> None:
    before = table(checked(1), checked(2, is_wrong=True), checked(3))
    found = pa.Table.from_batches([to_batch([verdict(2)])])

    after = after_run(before, found, Level.ENDS, listed=None, deleted=[3])

    assert sorted(after["ledger_id"].to_pylist()) == [1, 2]
    assert doubtful_ledgers(after, Level.ENDS).to_pylist() == []


def test_ledgers_that_were_wrong_or_unknown_are_checked_with_the_changed_ones() -> None:
    changes = FeedChanges(
        client="fsck-ends",
        generation=1,
        position=9,
        is_whole=False,
        ledger_ids=array("q", [7, 1, 6, 2]),
        versions=array("Q", [10, 11, 12, 13]),
        are_deleted=bytes([0, 0, 1, 1]),
    )
    before = table(
        checked(1),
        checked(2, is_wrong=True),  # deleted meanwhile
        checked(3, is_wrong=True),
        checked(4, is_unknown=True),
        checked(5, is_wrong=True, level=Level.METADATA),  # this level finds it if it is there
        checked(8, is_wrong=True, level=Level.FULL),
        checked(9),
    )

    assert ledgers_to_check(changes, before, Level.ENDS).tolist() == [1, 3, 4, 7, 8]
