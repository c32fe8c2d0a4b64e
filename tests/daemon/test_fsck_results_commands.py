"""``bookmender fsck mark`` and ``show``, which use the results of runs."""

import json
import shutil
from pathlib import Path

import pytest

from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding, Grade
from ledgers.errors import SettingsError
from tests.daemon.fsck_calls import (
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


def test_results_of_another_release_are_refused(
    runs: FakeRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for run in (RUN, LATER_RUN):
        leave_results(tmp_path, [LOST], run=run)
    for path in (*tmp_path.glob("summaries/*.json"), tmp_path / "summary.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))

    assert failing(monkeypatch, "mark", "--metadata-service-uri", URI, tmp_path) == 3
    assert "a record of version 2, and this release reads 1" in capsys.readouterr().err


def test_the_last_verdict_of_a_ledger_is_found_in_any_run(tmp_path: Path) -> None:
    leave_results(tmp_path, [LOST, whole(7)], run="1", level=Level.FULL)
    leave_results(tmp_path, [whole(1)], run="2", level=Level.METADATA)
    leave_results(tmp_path, [whole(8)], run="3", level=Level.FULL)

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


def test_marking_without_results_is_refused(tmp_path: Path) -> None:
    said = call("mark", "--metadata-service-uri", URI, tmp_path)

    assert isinstance(said.exception, SettingsError)
