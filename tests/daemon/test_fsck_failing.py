"""Obstacles to ``bookmender fsck run``: they are reported, and do not look like damage."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from auditor.fsck.damage_marker import DamagedLedger, MarkPreview, Show
from auditor.fsck.options import FsckOptions
from auditor.fsck.results.rows import SCHEMA
from auditor.fsck.results.run_folder import FIRST, RunFolder
from auditor.fsck.results.summary import Summary
from daemon.cli import fsck as fsck_command
from daemon.fsck.runner import LOCK_FILE, MarkResult, locked_output
from daemon.settings import Settings
from ledgers.errors import CorruptionError, RejectedError, SettingsError, UnavailableError
from tests.daemon.fsck_calls import LOST, URI, FakeRuns, call, call_run, failing, fake_runs
from tests.fsck.results import RUN


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    return fake_runs(monkeypatch)


def arguments_for(folder: Path) -> tuple[str | Path, ...]:
    return "run", "--metadata-service-uri", URI, "--output", folder


def test_two_runs_cannot_write_to_one_folder(
    runs: FakeRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with locked_output(tmp_path):
        assert failing(monkeypatch, *arguments_for(tmp_path)) == 2
    said = capsys.readouterr().err
    assert (
        f"another run of fsck (process {os.getpid()} on {socket.gethostname()}) writes there"
        in said
    )
    assert runs.wanted is None

    assert failing(monkeypatch, *arguments_for(tmp_path)) == 0, "the lock goes with the run"


def test_a_lock_without_a_name_still_excludes_other_runs(tmp_path: Path) -> None:
    with locked_output(tmp_path):
        os.truncate(tmp_path / LOCK_FILE, 0)

        with pytest.raises(SettingsError, match="another run of fsck writes there"):
            locked_output(tmp_path).__enter__()


def test_a_link_in_the_place_of_the_lock_is_refused(runs: FakeRuns, tmp_path: Path) -> None:
    victim, output = tmp_path / "victim", tmp_path / "results"
    victim.write_text("precious")
    output.mkdir()
    (output / LOCK_FILE).symlink_to(victim)

    said = call_run(output)

    assert isinstance(said.exception, SettingsError)
    assert "Find out who made it, and delete it" in str(said.exception)
    assert victim.read_text() == "precious"
    assert runs.wanted is None


def test_a_full_disk_is_reported_with_its_folder(runs: FakeRuns, tmp_path: Path) -> None:
    runs.raises = OSError(errno.ENOSPC, "No space left on device")

    said = call_run(tmp_path)

    assert isinstance(said.exception, OSError)
    assert said.exception.filename == str(tmp_path)


def test_an_unwritable_folder_is_refused_before_the_start(runs: FakeRuns, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    said = call_run(file / "results")

    assert isinstance(said.exception, SettingsError)
    assert "cannot be written to" in str(said.exception)
    assert runs.wanted is None


def test_a_file_system_without_locks_is_reported_as_such(
    runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)

    said = call_run(tmp_path)

    assert isinstance(said.exception, SettingsError)
    assert "cannot be locked: No locks available" in str(said.exception)


@pytest.mark.parametrize(
    ("has_results", "options", "told"),
    [
        pytest.param(False, (), "no part was finished", id="at once"),
        pytest.param(True, (), "the same command continues the run", id="after a part"),
        pytest.param(
            True,
            ("--restart",),
            "the same command without --restart continues the run",
            id="a restart",
        ),
    ],
)
def test_an_interrupted_run_says_how_to_continue(
    runs: FakeRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    has_results: bool,
    options: tuple[str, ...],
    told: str,
) -> None:
    folder, none = RunFolder(tmp_path, RUN), SCHEMA.empty_table()
    folder.begin([], FsckOptions(metadata_service_uri=URI), started_ms=0)
    if has_results:
        folder.write(FIRST, 0, none, none, gone=1)
    runs.raises = KeyboardInterrupt()

    code = failing(monkeypatch, *arguments_for(tmp_path), *options)

    assert code == 130
    assert told in capsys.readouterr().err


def test_an_interruption_after_the_run_says_it_is_complete(
    runs: FakeRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def interrupted(settings: Settings, summary: Summary) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fsck_command, "publish_summary", interrupted)

    code = failing(monkeypatch, *arguments_for(tmp_path))

    assert code == 130
    said = capsys.readouterr().err
    assert "the run is complete" in said
    assert "no part was finished" not in said


@pytest.mark.parametrize(
    ("error", "is_expected"),
    [
        pytest.param(RuntimeError("Spark's own"), False, id="a crash"),
        pytest.param(UnavailableError("no answer"), True, id="ZooKeeper does not answer"),
        pytest.param(OSError(28, "no space left"), True, id="the disk is full"),
        pytest.param(CorruptionError("no layout"), False, id="data in ZooKeeper cannot be read"),
    ],
)
def test_a_failure_exits_with_3_and_says_how_to_continue(
    runs: FakeRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    is_expected: bool,
) -> None:
    runs.raises = error
    monkeypatch.setattr("daemon.cli.main._drop_output", lambda: None)

    assert failing(monkeypatch, *arguments_for(tmp_path)) == 3

    told = "no part was finished; the same command starts over"
    assert not is_expected or told in capsys.readouterr().err


def test_a_wrong_uri_is_reported_with_its_option(runs: FakeRuns, tmp_path: Path) -> None:
    said = call("run", "--metadata-service-uri", "zk1:2181", "--output", tmp_path)

    assert isinstance(said.exception, SettingsError)
    assert str(said.exception).startswith("--metadata-service-uri: ")


def test_a_failure_to_mark_still_prints_the_results(
    runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(
        settings: Settings, folder: Path, run: str, faults: Sequence[DamagedLedger], show: Show
    ) -> MarkResult:
        raise RejectedError("auto-recovery is switched off")

    monkeypatch.setattr(fsck_command, "mark_damaged", refuse)
    runs.verdicts = [LOST]

    said = call_run(tmp_path, "--mark")

    assert said.exit_code == 1
    assert "not marked: auto-recovery is switched off" in said.stderr
    assert "would mark ledger 1" in said.stdout


def test_a_failed_preview_still_prints_the_results(
    runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(
        settings: Settings, folder: Path, faults: Sequence[DamagedLedger], show: Show
    ) -> MarkPreview:
        raise UnavailableError("no answer")

    monkeypatch.setattr(fsck_command, "preview_damaged", refuse)
    runs.verdicts = [LOST]

    said = call_run(tmp_path / "a")
    record = json.loads(call_run(tmp_path / "b", "--json").stdout)

    assert said.exit_code == 1
    assert "cannot check for changes since the run: no answer" in said.stderr
    assert "would mark ledger 1" in said.stdout
    assert (record["marks"]["would_mark"], record["marks"]["changed"]) == (1, None)
