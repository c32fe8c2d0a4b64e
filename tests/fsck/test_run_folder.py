"""The files of a run: everything in its folder survives the process that wrote it."""

import json
from array import array
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from auditor.fsck.options import FeedChanges, FsckOptions, Level
from auditor.fsck.results.plan import CHECKED, PLANNED, plan_rows
from auditor.fsck.results.rows import SCHEMA, from_table, read_note, replace_table, to_batch
from auditor.fsck.results.run_folder import AGAIN, FIRST, RunFolder, next_run, unfinished_runs
from auditor.fsck.verdicts import Grade, LedgerVerdict
from ledgers.errors import SettingsError
from tests.fsck.results import counted

RUN = "20261121T193500Z"
OPTIONS = FsckOptions(metadata_service_uri="zk://127.0.0.1:2181/ledgers", level=Level.FULL)
WHOLE = [LedgerVerdict(ledger_id=n, grade=Grade.WHOLE, bytes_read=5) for n in (1, 2)]
LOST = [LedgerVerdict(ledger_id=3, grade=Grade.LOST, entries_read=7, bytes_read=70)]


def rows(verdicts: list[LedgerVerdict]) -> pa.Table:
    return pa.Table.from_batches([to_batch(verdicts)], schema=SCHEMA)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return the folder of a run over three ledgers, in two parts."""
    folder = RunFolder(tmp_path, RUN)
    plan = plan_rows(array("q", [1, 2, 3]), CHECKED.empty_table(), Level.FULL, oldest_first=False)
    folder.begin([plan.slice(0, 2), plan.slice(2)], OPTIONS, started_ms=12, hidden=["/a"])
    return folder


def test_a_killed_run_is_found_with_its_progress(tmp_path: Path, folder: RunFolder) -> None:
    folder.write(FIRST, 1, rows(WHOLE), rows(LOST), gone=4)

    assert list(unfinished_runs(tmp_path)) == [RUN]
    again = RunFolder(tmp_path, RUN)
    again.check_options(OPTIONS)
    assert (again.begun_with["started_ms"], again.begun_with["hidden"]) == (12, ["/a"])
    assert len(again.plan.sizes) == 2
    (done,) = again.counts(FIRST).items()
    assert done[0] == 1
    assert (done[1].gone, done[1].to_recheck) == (4, 1)
    assert (done[1].to_recheck_entries, done[1].to_recheck_bytes) == (7, 70)
    assert done[1].final == counted(WHOLE)
    assert list(from_table(again.rows_to_recheck(1))) == LOST
    assert again.counts(AGAIN) == {}


def test_a_run_of_the_last_release_continues(tmp_path: Path, folder: RunFolder) -> None:
    """Its counts have skipped ledgers, and its plan says which metadata may be skipped."""
    folder.write(FIRST, 1, rows(WHOLE), rows([]), gone=0)
    path = tmp_path / "state" / f"run={RUN}" / "ledgers" / "part-00001.parquet"
    counts = {**json.loads(read_note(path, "bookmender.part")), "skipped": 3}
    replace_table(path, rows(WHOLE), note={"bookmender.part": json.dumps(counts)})
    plan = plan_rows(array("q", [5]), CHECKED.empty_table(), Level.FULL, oldest_first=False)
    known = pa.array([8], pa.int32())
    folder.plan.write(path.parent.parent / "plan.parquet", [plan.set_column(1, PLANNED[1], known)])

    assert folder.counts(FIRST)[1].final == counted(WHOLE)
    assert list(folder.plan.part(0).ledger_ids) == [5]


def test_suspected_ledgers_are_results_only_after_the_recheck(folder: RunFolder) -> None:
    folder.write(FIRST, 1, rows(WHOLE), rows(LOST), gone=0)
    before = folder.verdicts(["ledger_id", "verdict"])

    folder.write(AGAIN, 1, rows(LOST), gone=1)

    assert before["ledger_id"].to_pylist() == [1, 2]
    after = folder.verdicts(["ledger_id", "verdict"])
    assert sorted(after["ledger_id"].to_pylist()) == [1, 2, 3]
    assert folder.counts(AGAIN)[1].final == counted(LOST)
    assert folder.counts(AGAIN)[1].gone == 1


def test_an_incomplete_file_is_ignored(tmp_path: Path, folder: RunFolder) -> None:
    role = tmp_path / "state" / f"run={RUN}" / "ledgers" / ".part-00000.parquet.new"
    role.write_bytes(b"PAR1 half")

    assert folder.counts(FIRST) == {}
    assert folder.verdicts(["ledger_id"]).num_rows == 0


def test_remains_of_killed_runs_are_deleted(tmp_path: Path, folder: RunFolder) -> None:
    for name in ("run=20250101T000000Z", "run=20250102T000000Z"):
        (tmp_path / "state" / name / "ledgers").mkdir(parents=True)
        (tmp_path / "state" / name / "plan.parquet").touch()
    (tmp_path / "state" / "checked.parquet").touch()

    assert next_run(tmp_path, is_restart=False, now_s=0.0) == RUN

    left = [path.name for path in sorted((tmp_path / "state").iterdir())]
    assert left == ["checked.parquet", f"run={RUN}"], "a run that can be continued stays"


def test_the_rows_of_a_run_appear_when_it_is_complete(tmp_path: Path, folder: RunFolder) -> None:
    folder.write(FIRST, 0, rows(WHOLE), rows([]), gone=0)
    assert list(tmp_path.glob("ledgers/run=*")) == [], "nothing of an unfinished run"

    folder.publish()

    assert ds.dataset(tmp_path / "ledgers", partitioning="hive").count_rows() == 2
    assert folder.verdicts(["ledger_id"]).num_rows == 2


def test_a_run_killed_at_its_end_can_end_when_continued(tmp_path: Path, folder: RunFolder) -> None:
    folder.write(FIRST, 0, rows(WHOLE), rows([]), gone=0)
    folder.publish()

    again = RunFolder(tmp_path, RUN)
    done = again.counts(FIRST)
    again.publish()
    again.end()

    assert list(done) == [0]
    assert again.verdicts(["ledger_id"]).num_rows == 2
    assert list(unfinished_runs(tmp_path)) == []
    assert list((tmp_path / "state").iterdir()) == []


def test_a_discarded_run_leaves_nothing_behind(tmp_path: Path, folder: RunFolder) -> None:
    folder.write(FIRST, 0, rows(WHOLE), rows(LOST), gone=0)

    folder.discard()

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list(unfinished_runs(tmp_path)) == []


def test_a_partly_discarded_run_has_no_results(
    tmp_path: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write(FIRST, 0, rows(WHOLE), rows([]), gone=0)
    folder.publish()

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.discard()

    assert list((tmp_path / "ledgers").iterdir()) == []
    assert list(unfinished_runs(tmp_path)) == []


def test_the_options_that_differ_are_named(folder: RunFolder) -> None:
    other = replace(OPTIONS, level=Level.SAMPLE, sample_share=0.5)

    differences = "level full, not sample; sample share 0.01, not 0.5"
    with pytest.raises(SettingsError, match=differences):
        folder.check_options(other)
    with pytest.raises(SettingsError, match="seed 0, not 1"):
        folder.check_options(replace(OPTIONS, seed=1))


def test_a_run_of_another_release_is_not_continued(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.fsck.results.run_folder.VERSION", 2)

    with pytest.raises(SettingsError, match="rows of version 1, not 2"):
        folder.check_options(OPTIONS)


def test_an_unfinished_run_keeps_what_the_feed_told(tmp_path: Path) -> None:
    changes = FeedChanges(
        client="fsck-full",
        generation=3,
        position=2**40,
        is_whole=False,
        ledger_ids=array("q", [5, 2]),
        versions=array("Q", [2**40 + 1, 2**40 + 2]),
        are_deleted=bytes([0, 1]),
    )
    RunFolder(tmp_path, RUN).begin([], OPTIONS, started_ms=12, changes=changes)

    again = RunFolder(tmp_path, RUN)

    assert again.changes == changes
    assert (changes.existing, changes.deleted) == ([5], [2])
    again.check_options(OPTIONS, client="fsck-full")
    with pytest.raises(SettingsError, match="changes of fsck-full, not no client"):
        again.check_options(OPTIONS)


def test_a_run_over_all_ledgers_has_no_changes(folder: RunFolder) -> None:
    assert folder.changes is None
    with pytest.raises(SettingsError, match="changes of no client, not a"):
        folder.check_options(OPTIONS, client="a")
