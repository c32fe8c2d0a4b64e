"""Chooses the ledgers that a run checks, and records their last check. Pure, on rows."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from auditor.fsck.ledger_list import COPY_BYTES
from auditor.fsck.options import FeedChanges, FsckOptions, Level
from auditor.fsck.results.plan import (
    CHECKED_FILE,
    PART_MAX,
    PART_WORK_MAX,
    Plan,
    after_run,
    cut_by_work,
    doubtful_ledgers,
    read_checked,
    wrong_among,
)
from auditor.fsck.results.rows import replace_table, to_batch
from auditor.fsck.run import ledgers_to_check
from auditor.fsck.verdicts import Grade, LedgerVerdict
from tests.fsck.planning import NOW_MS, checked, ids, options, planned, table


def test_with_a_time_budget_the_oldest_checks_come_first() -> None:
    known = table(checked(1), checked(2, days_ago=9), checked(4, days_ago=9), checked(5))

    rows = planned([1, 2, 3, 4, 5, 6], known, oldest_first=True)

    assert rows["ledger_id"].to_pylist() == [3, 6, 2, 4, 1, 5]


def test_a_less_close_check_does_not_change_the_order() -> None:
    known = table(
        *(checked(each, days_ago=9 - each, level=Level.FULL) for each in (1, 2)),
        *(checked(each, days_ago=0, level=Level.METADATA) for each in (1, 2, 3)),
    )

    rows = planned([1, 2, 3], known, Level.FULL, oldest_first=True)

    assert rows["ledger_id"].to_pylist() == [3, 1, 2]


def test_a_ledger_is_planned_once() -> None:
    known = table(*(checked(1, level=level) for level in Level))

    assert planned([1], known, oldest_first=True).num_rows == 1


def test_a_written_plan_has_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    listed = [7, 9, 2**40, 2**62, 2**63 - 1]
    rows = planned(listed, table(checked(9), checked(2**62)))

    Plan.write(path, [rows.slice(start, 2) for start in (0, 2, 4)])

    plan = Plan(path)
    parts = [plan.part(number) for number in range(len(plan.sizes))]
    assert [list(part.ledger_ids) for part in parts] == [[7, 9], [2**40, 2**62], [2**63 - 1]]
    assert plan.sizes == [2, 2, 1]
    assert plan.ledger_ids([0, 2]).to_pylist() == [7, 9, 2**63 - 1]
    assert plan.ledger_ids([]).to_pylist() == []
    assert plan.work == [2, 2, 1]


def test_a_cluster_without_ledgers_has_a_plan_without_parts(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"

    rows = planned([], table())
    parts = cut_by_work(rows, options(Level.FULL), slot_count=2, keeps_order=False)
    Plan.write(path, parts)

    assert Plan(path).sizes == []


def weighed(weights: Sequence[int], *, keeps_order: bool = False) -> list[list[int]]:
    """Return the weights of each part, for level ``full`` on two slots."""
    rows = planned(range(len(weights)), table(), Level.FULL, work=weights)
    parts = cut_by_work(rows, options(Level.FULL), slot_count=2, keeps_order=keeps_order)
    return [part["work"].to_pylist() for part in parts]


@pytest.mark.parametrize(
    ("ledgers", "level", "slot_count", "sizes"),
    [
        pytest.param(13, Level.ENDS, 2, [13], id="a small cluster is one part"),
        pytest.param(1_000, Level.ENDS, 2, [334, 334, 111, 111, 55, 55], id="parts become lighter"),
        pytest.param(
            10_000, Level.ENDS, 2, [2_000, 2_000, 2_000, 2_000, 667], id="a part is bounded"
        ),
        pytest.param(
            200_000, Level.METADATA, 2, [25_000] * 6 + [16_667] * 2, id="metadata is cheap"
        ),
        pytest.param(1_300, Level.ENDS, 0, [1_300], id="one part in this process"),
    ],
)
def test_ledgers_of_equal_weight_are_cut_by_count(
    ledgers: int, level: Level, slot_count: int, sizes: list[int]
) -> None:
    rows = planned(range(ledgers), table(), level)

    parts = cut_by_work(rows, options(level), slot_count=slot_count, keeps_order=False)

    assert [part.num_rows for part in parts][: len(sizes)] == sizes
    assert sum(part.num_rows for part in parts) == ledgers


@pytest.mark.parametrize("slot_count", [1, 2, 3, 8])
def test_equal_slots_end_together(slot_count: int) -> None:
    rows = planned(range(1_000_000), table(), Level.METADATA)

    parts = cut_by_work(rows, options(Level.METADATA), slot_count=slot_count, keeps_order=False)

    slots = [0] * slot_count
    for part in parts:
        slots[slots.index(min(slots))] += part.num_rows
    assert max(slots) - min(slots) <= len(parts)


def test_parts_become_lighter_with_different_ledgers() -> None:
    light, heavy = [1_000] * 1_000, [100_000] * 10

    parts = weighed([*light, *heavy])

    assert [sum(part) for part in parts][:5] == [500_000, 500_000, 200_000, 200_000, 100_000]
    assert sum(parts[-1]) == 100_000
    assert sum(map(len, parts)) == 1_010


def test_the_heaviest_part_comes_first_unless_time_may_be_short() -> None:
    weights = [30_000, 1_000_000, 30_000, 500_000]

    assert [sum(part) for part in weighed(weights)] == [1_000_000, 500_000, 30_000, 30_000]
    assert [sum(part) for part in weighed(weights, keeps_order=True)] == weights


@pytest.mark.parametrize(
    ("weights", "sizes"),
    [
        pytest.param([1] * 100, [100], id="little work is one part"),
        pytest.param(
            [9 * PART_WORK_MAX, 1, 9 * PART_WORK_MAX], [1, 1, 1], id="one ledger is never cut"
        ),
        pytest.param([PART_WORK_MAX // 4] * 100, [4] * 20, id="a part is bounded"),
        pytest.param([1] * 1_200, [500, 500, 200], id="verdicts of a part are bounded"),
    ],
)
def test_a_part_has_a_minimum_and_a_maximum_weight(weights: list[int], sizes: list[int]) -> None:
    assert PART_MAX[Level.FULL] == 500
    assert [len(part) for part in weighed(weights)][: len(sizes)] == sizes


@pytest.mark.parametrize(
    "limited",
    [
        pytest.param(replace(options(Level.FULL), reads_per_s=2_000), id="entries"),
        pytest.param(replace(options(Level.FULL), bytes_per_s=2_000 * COPY_BYTES), id="bytes"),
    ],
)
def test_with_limited_reads_a_part_takes_about_a_minute(limited: FsckOptions) -> None:
    rows = planned(range(100), table(), Level.FULL, work=[20_000] * 100)

    parts = cut_by_work(rows, limited, slot_count=2, keeps_order=False)

    assert [sum(part["work"].to_pylist()) for part in parts][:30] == [60_000] * 30


@pytest.mark.parametrize(
    ("before", "level", "is_full_scan"),
    [
        pytest.param(checked(1, level=Level.SAMPLE, is_wrong=True), Level.SAMPLE, True, id="wrong"),
        pytest.param(checked(1, level=Level.SAMPLE), Level.SAMPLE, False, id="fine"),
        pytest.param(
            checked(2, level=Level.SAMPLE, is_wrong=True), Level.SAMPLE, False, id="other"
        ),
        pytest.param(
            checked(1, level=Level.SAMPLE, is_wrong=True),
            Level.FULL,
            False,
            id="level full reads everything",
        ),
        pytest.param(
            checked(1, is_wrong=True), Level.SAMPLE, False, id="damage that all samples see"
        ),
    ],
)
def test_a_ledger_found_wrong_by_a_sample_is_read_completely(
    before: dict[str, object], level: Level, is_full_scan: bool, tmp_path: Path
) -> None:
    path = tmp_path / "plan.parquet"
    Plan.write(path, [planned([1, 5], table(before), level)])

    assert Plan(path).part(0).full_scan == ({1} if is_full_scan else frozenset())


# --- The record of the last checks ----------------------------------------------------------------


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
