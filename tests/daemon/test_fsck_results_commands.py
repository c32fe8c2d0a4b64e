"""``bookmender fsck mark``, ``report``, ``show`` and ``diff``, which use the results of runs."""

import json
import shutil
from pathlib import Path

import pytest

from auditor.fsck.options import Level
from auditor.fsck.results.cluster import Cluster, keep_cluster
from auditor.fsck.verdicts import Finding, Grade
from ledgers.errors import SettingsError
from tests.daemon.fsck_calls import (
    CLUSTER,
    LOST,
    UNKNOWN,
    URI,
    A,
    FakeRuns,
    call,
    call_run,
    failing,
    fake_runs,
)
from tests.fsck.results import LATER_RUN, RUN, damaged, leave_results, seen, whole

LOST_TOO = damaged(7, Grade.LOST, seen(Finding.MISSING, A))
OTHER = Cluster(instance_id="id-2", metadata_service_uri=URI)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    return fake_runs(monkeypatch)


def test_ledgers_are_marked_only_with_the_option(runs: FakeRuns, tmp_path: Path) -> None:
    leave_results(tmp_path, [whole(0), LOST, UNKNOWN])

    dry = call("mark", tmp_path, "--metadata-service-uri", URI)
    assert dry.exit_code == 0
    assert "would mark ledger 1" in dry.stdout
    assert runs.published == []

    said = call("mark", tmp_path, "--metadata-service-uri", URI, "--mark")
    assert [fault.ledger_id for fault in runs.published] == [1]
    assert "1 ledger marked, 2 were marked already, 3 left out" in said.stdout
    assert "only a bookmender worker repairs it; no such worker is running" in said.stdout


def test_the_preview_leaves_out_ledgers_changed_since(runs: FakeRuns, tmp_path: Path) -> None:
    leave_results(tmp_path, [LOST, LOST_TOO])
    runs.changed = [1]

    said = call("mark", tmp_path, "--metadata-service-uri", URI)
    record = json.loads(call("mark", tmp_path, "--metadata-service-uri", URI, "--json").stdout)

    assert said.stdout.splitlines() == [
        f"would mark ledger 7 (lost): {A}: missing, entry 3",
        "1 ledger would be marked, 1 left out: changed or deleted since the run; --mark marks them",
        "1 ledger of these in bookmender's private queue: Java's workers cannot detect this "
        "damage, so only a bookmender worker repairs it",
    ]
    assert {**record, "first_ledgers": []} == {
        "would_mark": 1,
        "changed": 1,
        "own": 1,
        "first_ledgers": [],
    }
    assert [each["ledger_id"] for each in record["first_ledgers"]] == [7]


def test_a_run_marks_what_it_found(runs: FakeRuns, tmp_path: Path) -> None:
    runs.verdicts = [LOST]

    record = json.loads(call_run(tmp_path, "--mark", "--json").stdout)

    assert [fault.ledger_id for fault in runs.published] == [1]
    assert record["marks"] == {
        "marked": 1,
        "known": 2,
        "changed": 3,
        "own": 1,
        "has_worker": False,
    }


def test_a_run_without_damage_marks_nothing(runs: FakeRuns, tmp_path: Path) -> None:
    runs.verdicts = [whole(0), UNKNOWN]

    assert "nothing to mark" in call_run(tmp_path, "--mark").stdout
    assert runs.published == []


def test_the_report_of_any_run_can_be_written_again(tmp_path: Path) -> None:
    leave_results(tmp_path, [LOST])
    leave_results(tmp_path, [whole(0)], run=LATER_RUN)

    said = call("report", tmp_path)

    assert said.stdout.strip() == str(tmp_path / "report.html")
    assert LATER_RUN in (tmp_path / "report.html").read_text()
    call("report", f"{tmp_path}@{RUN}")
    assert LATER_RUN not in (tmp_path / "report.html").read_text()


def test_the_last_two_runs_of_a_folder_are_compared(tmp_path: Path) -> None:
    leave_results(tmp_path, [whole(1), UNKNOWN])
    leave_results(tmp_path, [LOST, whole(7)], run=LATER_RUN)

    said = call("diff", tmp_path)

    assert said.exit_code == 1
    assert said.stdout.splitlines() == [
        "changed: ledger 1: whole -> lost",
        "deleted: ledger 2: was unknown",
        "1 ledger new, and whole",
    ]
    assert f"run {RUN}, then run {LATER_RUN}" in said.stderr


@pytest.mark.parametrize(
    ("skipped", "told"),
    [
        pytest.param(0, "new", id="all were checked"),
        pytest.param(1, "new, or not checked before", id="some were left out"),
    ],
)
def test_a_ledger_without_an_earlier_verdict_is_new(
    tmp_path: Path, skipped: int, told: str
) -> None:
    leave_results(tmp_path, [whole(1)], skipped=skipped)
    leave_results(tmp_path, [whole(1), LOST_TOO], run=LATER_RUN)

    assert call("diff", tmp_path).stdout.splitlines() == [f"{told}: ledger 7: lost"]
    record = json.loads(call("diff", tmp_path, "--json").stdout)
    assert record["is_newness_certain"] is (skipped == 0)


@pytest.mark.parametrize(
    "broken", [f"summaries/{RUN}.json", f"ledgers/run={RUN}/part-00000.parquet"]
)
def test_a_diff_of_unreadable_results_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    leave_results(tmp_path, [LOST])
    leave_results(tmp_path, [LOST], run=LATER_RUN)
    (tmp_path / broken).write_bytes(b"role")

    assert failing(monkeypatch, "diff", tmp_path) == 3


@pytest.mark.parametrize(
    "arguments", [["report"], ["diff"], ["mark", "--metadata-service-uri", URI]], ids=lambda a: a[0]
)
def test_results_of_another_release_are_refused(
    runs: FakeRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    for run in (RUN, LATER_RUN):
        leave_results(tmp_path, [LOST], run=run)
    for path in (*tmp_path.glob("summaries/*.json"), tmp_path / "summary.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))

    assert failing(monkeypatch, *arguments, tmp_path) == 3
    assert "a record of version 2, and this release reads 1" in capsys.readouterr().err


def test_a_less_close_run_cannot_show_improvements(tmp_path: Path) -> None:
    levels = {"1": Level.ENDS, "2": Level.FULL, "3": Level.ENDS}
    for run, level in levels.items():
        leave_results(tmp_path, [LOST if level is Level.FULL else whole(1)], run=run, level=level)

    said = call("diff", tmp_path)

    assert isinstance(said.exception, SettingsError)
    assert str(said.exception) == (
        "run 3 (level ends) is less close than run 2 (level full), so it cannot show "
        f"improvements: compare it with {tmp_path}@1 (level ends)"
    )
    assert call("diff", f"{tmp_path}@1", f"{tmp_path}@3").exit_code == 0
    assert call("diff", f"{tmp_path}@1", f"{tmp_path}@2").exit_code == 1


def test_a_run_without_rows_is_not_suggested_for_a_diff(tmp_path: Path) -> None:
    for run, level in {"1": Level.ENDS, "2": Level.FULL, "3": Level.ENDS}.items():
        leave_results(tmp_path, [whole(1)], run=run, level=level)
    shutil.rmtree(tmp_path / "ledgers" / "run=1")

    said = call("diff", tmp_path)

    assert str(said.exception).endswith("run fsck again at level full")


def test_results_of_two_clusters_are_not_compared(tmp_path: Path) -> None:
    for name, cluster in (("a", CLUSTER), ("b", OTHER)):
        leave_results(tmp_path / name, [whole(1)])
        keep_cluster(tmp_path / name, cluster)

    said = call("diff", tmp_path / "a", tmp_path / "b")

    assert isinstance(said.exception, SettingsError)
    assert "id-1" in str(said.exception)
    assert "id-2" in str(said.exception)


def test_the_last_verdict_of_a_ledger_is_found_in_any_run(tmp_path: Path) -> None:
    leave_results(tmp_path, [LOST, whole(7)], run="1", level=Level.FULL)
    leave_results(tmp_path, [whole(1)], run="2", level=Level.METADATA)
    leave_results(tmp_path, [whole(8)], run="3", level=Level.FULL, skipped=1)

    said = call("show", tmp_path, "1")

    assert said.exit_code == 1, "no run at this level since"
    assert said.stdout.splitlines() == [
        "run 2, level metadata, at 2023-11-14 22:13:20 UTC; 1 later run did not check it:",
        "  whole, closed, last entry 9, 1 kB",
        "run 1, level full, at 2023-11-14 22:13:20 UTC; at a closer level:",
        "  lost, closed, last entry 9, 1 kB",
        f"    missing, {A}, entry 3",
    ]
    skipped = json.loads(call("show", tmp_path, "7", "--json").stdout)
    assert [each["verdict"] for each in skipped["verdicts"]] == ["whole"]
    assert skipped["verdicts"][0]["later_runs"] == 2


@pytest.mark.parametrize(
    ("deleted", "told"),
    [
        pytest.param((), "; 2 later runs did not check it", id="none deleted"),
        pytest.param(
            *(("2",), "; 1 later run did not check it; the rows of 1 later run were deleted"),
            id="one",
        ),
        pytest.param(("2", "3"), "; the rows of 2 later runs were deleted", id="all"),
    ],
)
def test_later_runs_without_rows_are_counted_apart(
    tmp_path: Path, deleted: tuple[str, ...], told: str
) -> None:
    """Their rows were deleted, so they may or may not have checked the ledger."""
    for run, ledger_id in (("1", 1), ("2", 7), ("3", 8)):
        leave_results(tmp_path, [whole(ledger_id)], run=run)
    for run in deleted:
        shutil.rmtree(tmp_path / "ledgers" / f"run={run}")

    line, *_ = call("show", tmp_path, "1").stdout.splitlines()
    record = json.loads(call("show", tmp_path, "1", "--json").stdout)

    assert line == f"run 1, level full, at 2023-11-14 22:13:20 UTC{told}:"
    [verdict] = record["verdicts"]
    assert (verdict["later_runs"], verdict["later_runs_deleted"]) == (2, len(deleted))


def test_differing_copies_are_named_beside_the_verdict_whole(tmp_path: Path) -> None:
    leave_results(tmp_path, [damaged(1, Grade.WHOLE, seen(Finding.SUSPECT, A))])

    said = call("show", tmp_path, "1")

    assert said.exit_code == 1
    assert said.stdout.splitlines()[1:] == [
        "  whole, copies differ, closed, last entry 9, 1 kB",
        f"    suspect, {A}, entry 3",
    ]


def test_showing_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    said = call("show", tmp_path / "elsewhere", "1")

    assert isinstance(said.exception, SettingsError)
    assert "there are no results of a finished fsck run" in str(said.exception)


def test_a_ledger_that_no_run_checked_is_unknown(tmp_path: Path) -> None:
    results = leave_results(tmp_path, [whole(1)])
    shutil.rmtree(leave_results(tmp_path, [whole(2)], run=LATER_RUN).path)

    said = call("show", tmp_path, "2")

    assert said.exit_code == 3
    assert "no run with rows has checked ledger 2" in said.stderr
    assert call("show", results.folder, "1").exit_code == 0


def test_an_improvement_exits_with_0(tmp_path: Path) -> None:
    leave_results(tmp_path, [LOST])
    leave_results(tmp_path, [whole(1)], run=LATER_RUN)

    said = call("diff", f"{tmp_path}@{RUN}", tmp_path, "-o", "json")

    assert said.exit_code == 0
    assert json.loads(said.stdout)["changed"] == [
        {"ledger_id": 1, "before": "lost", "after": "whole", "is_worse": False}
    ]


def test_commands_without_results_say_so(tmp_path: Path) -> None:
    for arguments in (["report"], ["diff"], ["mark", "--metadata-service-uri", URI]):
        said = call(*arguments, tmp_path)
        assert isinstance(said.exception, SettingsError), arguments
