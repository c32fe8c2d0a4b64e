"""A run's files: whatever stands there survives the process that wrote it."""

from array import array
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from auditor.fsck.options import FsckJob, FsckOptions, Level
from auditor.fsck.results.checked import CHECKED
from auditor.fsck.results.plan import plan_rows
from auditor.fsck.results.rows import SCHEMA, from_table, to_batch
from auditor.fsck.results.run_folder import RunFolder, delete_remains, unfinished_runs
from auditor.fsck.verdicts import Grade, LedgerVerdict
from tests.fsck.results import counted

RUN = "20261121T193500Z"
OPTIONS = FsckOptions(metadata_service_uri="zk://127.0.0.1:2181/ledgers", level=Level.FULL)
WHOLE = [LedgerVerdict(ledger_id=n, grade=Grade.WHOLE, bytes_read=5) for n in (1, 2)]
LOST = [LedgerVerdict(ledger_id=3, grade=Grade.LOST, entries_read=7, bytes_read=70)]


def rows(verdicts: list[LedgerVerdict]) -> pa.Table:
    return pa.Table.from_batches([to_batch(verdicts)], schema=SCHEMA)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run over three ledgers, in two parts."""
    folder = RunFolder(tmp_path, RUN)
    job = FsckJob(run=RUN, output=tmp_path)
    plan = plan_rows(array("q", [1, 2, 3]), CHECKED.empty_table(), OPTIONS, job, now_ms=0)
    folder.begin([plan.slice(0, 2), plan.slice(2)], OPTIONS, started_ms=12)
    return folder


def test_a_killed_run_is_found_with_all_that_it_had_done(tmp_path: Path, folder: RunFolder) -> None:
    folder.write_first_check(1, rows(WHOLE), rows(LOST), skipped=3, gone=4)

    assert list(unfinished_runs(tmp_path)) == [RUN]
    again = RunFolder(tmp_path, RUN)
    assert again.differences(OPTIONS) == []
    assert (again.started_ms, again.plan.part_count) == (12, 2)
    (done,) = again.first_checks().items()
    assert done[0] == 1
    assert (done[1].skipped, done[1].gone, done[1].to_recheck) == (3, 4, 1)
    assert (done[1].to_recheck_entries, done[1].to_recheck_bytes) == (7, 70)
    assert done[1].final == counted(WHOLE)
    assert list(from_table(again.rows_to_recheck(1))) == LOST
    assert again.rechecks() == {}


def test_what_seemed_wrong_stands_in_the_results_only_after_the_second_look(
    folder: RunFolder,
) -> None:
    folder.write_first_check(1, rows(WHOLE), rows(LOST), skipped=0, gone=0)
    before = folder.verdicts(["ledger_id", "verdict"])

    folder.write_recheck(1, rows(LOST), gone=1)

    assert before["ledger_id"].to_pylist() == [1, 2]
    after = folder.verdicts(["ledger_id", "verdict"])
    assert sorted(after["ledger_id"].to_pylist()) == [1, 2, 3]
    assert folder.rechecks()[1].final == counted(LOST)
    assert folder.rechecks()[1].gone == 1


def test_what_is_half_written_is_not_there(tmp_path: Path, folder: RunFolder) -> None:
    role = tmp_path / "state" / f"run={RUN}" / "ledgers" / ".part-00000.parquet.new"
    role.write_bytes(b"PAR1 half")

    assert folder.first_checks() == {}
    assert folder.verdicts(["ledger_id"]).num_rows == 0


def test_a_run_that_was_killed_while_it_planned_was_never_begun(tmp_path: Path) -> None:
    (tmp_path / "state" / f"run={RUN}").mkdir(parents=True)

    assert list(unfinished_runs(tmp_path)) == []


def test_what_runs_leave_that_died_while_they_began_or_ended_is_swept_up(
    tmp_path: Path, folder: RunFolder
) -> None:
    for name in ("run=20250101T000000Z", "run=20250102T000000Z"):
        (tmp_path / "state" / name / "ledgers").mkdir(parents=True)
        (tmp_path / "state" / name / "plan.parquet").touch()
    (tmp_path / "state" / "checked.parquet").touch()

    delete_remains(tmp_path)

    left = [path.name for path in sorted((tmp_path / "state").iterdir())]
    assert left == ["checked.parquet", f"run={RUN}"], "a run that can be gone on with stays"


def test_what_is_half_written_is_not_published(tmp_path: Path, folder: RunFolder) -> None:
    (tmp_path / "state" / f"run={RUN}" / "ledgers" / ".part-00001.parquet.new").touch()

    folder.publish()

    assert list((tmp_path / "ledgers" / f"run={RUN}").iterdir()) == []


def test_readers_see_the_rows_of_a_run_once_it_is_over(tmp_path: Path, folder: RunFolder) -> None:
    folder.write_first_check(0, rows(WHOLE), rows([]), skipped=0, gone=0)
    assert list(tmp_path.glob("ledgers/run=*")) == [], "nothing of a run under way, or killed"

    folder.publish()

    assert ds.dataset(tmp_path / "ledgers", partitioning="hive").count_rows() == 2
    assert folder.verdicts(["ledger_id"]).num_rows == 2


def test_a_run_that_was_killed_at_its_end_ends_when_it_goes_on(
    tmp_path: Path, folder: RunFolder
) -> None:
    folder.write_first_check(0, rows(WHOLE), rows([]), skipped=0, gone=0)
    folder.publish()

    again = RunFolder(tmp_path, RUN)
    done = again.first_checks()
    again.publish()
    again.end()

    assert list(done) == [0]
    assert again.verdicts(["ledger_id"]).num_rows == 2
    assert list(unfinished_runs(tmp_path)) == []
    assert list((tmp_path / "state").iterdir()) == []


def test_of_a_run_that_is_given_up_nothing_stays(tmp_path: Path, folder: RunFolder) -> None:
    folder.write_first_check(0, rows(WHOLE), rows(LOST), skipped=0, gone=0)

    folder.discard()

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list(unfinished_runs(tmp_path)) == []


def test_a_run_that_was_half_given_up_stands_in_no_results(
    tmp_path: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_first_check(0, rows(WHOLE), rows([]), skipped=0, gone=0)
    folder.publish()

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.discard()

    assert list((tmp_path / "ledgers").iterdir()) == []
    assert list(unfinished_runs(tmp_path)) == []


def test_a_run_with_other_options_is_another_run_and_they_are_named(folder: RunFolder) -> None:
    other = replace(OPTIONS, level=Level.SAMPLE, sample_share=0.5, entry_lists=True)

    assert folder.differences(other) == [
        "level full, not sample",
        "sample share 0.01, not 0.5",
        "entry lists False, not True",
    ]
    assert folder.differences(replace(OPTIONS, seed=1)) == ["seed 0, not 1"]


def test_a_run_that_another_release_began_is_not_gone_on_with(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.fsck.results.run_folder.VERSION", 2)

    assert folder.differences(OPTIONS) == ["rows of version 1, not 2"]


def test_it_has_results_as_soon_as_a_part_is_done(folder: RunFolder) -> None:
    assert not folder.has_results

    folder.write_first_check(0, rows(WHOLE), rows([]), skipped=0, gone=0)

    assert folder.has_results
