"""``bookmender ledger restore`` as far as no cluster is needed: what it lists, and what it
refuses."""

import json
import os
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner, Result

from daemon.cli import restore as restore_command
from daemon.cli.restore import restore
from ledgers.codec.metadata import serialize_metadata
from ledgers.errors import RejectedError
from ledgers.store import Stat
from replication.commit import CopyDoubt
from replication.copy_checks import Verdict
from replication.journal import JournalRecord, MetadataJournal, read_journal
from replication.restore import Restoring
from tests.replication.ledger_values import B1, B2, B3, B4, closed_ledger

WRITTEN_MS = 1_700_000_000_000
BEFORE, AFTER = (
    serialize_metadata(closed_ledger(ensemble)) for ensemble in ((B1, B2, B3), (B1, B4, B3))
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a journal lies that holds a write of ledger 7."""
    for name in os.environ:
        if name.startswith("BOOKMENDER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("BOOKMENDER_METADATA_SERVICE_URI", "zk+hierarchical://127.0.0.1:1/ledgers")
    monkeypatch.setenv("BOOKMENDER_NODE_STATE_DIR", str(tmp_path))
    journal = MetadataJournal(tmp_path / "journal", process="host-1")
    journal.record([JournalRecord(time_ms=WRITTEN_MS, ledger_id=7, before=BEFORE, after=AFTER)])
    journal.close()
    return tmp_path


def called(*arguments: str) -> Result:
    return CliRunner().invoke(restore, arguments)


def test_without_a_time_the_recorded_writes_are_listed(state: Path) -> None:
    [record] = read_journal(state / "journal", 7)

    said = called("7")

    assert said.exit_code == 0
    line, count = said.output.splitlines()
    assert "  unknown cluster  " in line
    assert line.startswith(f"{record.time_ms}  ")
    assert line.endswith(f"from entry 0: {B1}, {B2}, {B3}  =>  from entry 0: {B1}, {B4}, {B3}")
    assert count == "1 write of ledger 7 recorded on this host"


def test_programs_are_told_what_each_write_changed(state: Path) -> None:
    record = json.loads(called("7", "-o", "json").output)

    [write] = record["writes"]
    assert write["before"] == ["CLOSED, last entry 9", f"from entry 0: {B1}, {B2}, {B3}"]
    assert write["after"] == ["CLOSED, last entry 9", f"from entry 0: {B1}, {B4}, {B3}"]


def test_it_is_told_in_which_cluster_each_write_was_made(state: Path) -> None:
    journal = MetadataJournal(state / "journal", process="host-2")
    there = JournalRecord(
        time_ms=WRITTEN_MS + 1, ledger_id=7, before=AFTER, after=BEFORE, cluster="3f2c"
    )
    journal.record([there])
    journal.close()

    assert "  3f2c  " in called("7").output.splitlines()[-2]
    writes = json.loads(called("7", "-o", "json").output)["writes"]
    assert [write["cluster"] for write in writes] == [None, "3f2c"]


def test_a_write_that_is_not_recorded_is_not_undone(state: Path) -> None:
    said = called("7", "--at", "1", "--yes")

    assert isinstance(said.exception, RejectedError)
    assert "no write of ledger 7 at 1 is recorded here" in str(said.exception)


@pytest.mark.parametrize("option", ["--yes", "--force"])
def test_it_is_not_guessed_which_write_is_meant(option: str, state: Path) -> None:
    said = called("7", option)

    assert said.exit_code == 2
    assert "--at says which write to undo" in said.output


DOUBT = CopyDoubt(bookie=B2, verdict=Verdict.LOST)


@pytest.mark.parametrize(
    ("doubts", "options", "said", "code"),
    [
        pytest.param((), [], "nothing was changed: --yes does it", 0, id="no doubt"),
        pytest.param((DOUBT,), [], "--yes --force does it", 1, id="in doubt"),
        pytest.param((DOUBT,), ["--force"], "--yes --force does it", 0, id="forced"),
    ],
)
def test_what_is_shown_names_the_options_that_do_it_and_ends_as_that_with_yes_would(
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    doubts: tuple[CopyDoubt, ...],
    options: list[str],
    said: str,
    code: int,
) -> None:
    [record] = read_journal(state / "journal", 7)
    now, was = closed_ledger((B1, B4, B3)), closed_ledger((B1, B2, B3))

    async def look(*_: object) -> Restoring:
        return Restoring(
            record=record,
            was=was,
            present=AFTER,
            now=now,
            stat=Stat(version=1),
            copy_doubts=doubts,
        )

    monkeypatch.setattr(restore_command, "_look", look)

    shown = called("7", "--at", str(record.time_ms), *options)
    assert said in shown.output
    assert shown.exit_code == code


def test_where_nothing_was_ever_written_it_is_said_where_it_looked(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = state / "elsewhere"
    monkeypatch.setenv("BOOKMENDER_NODE_STATE_DIR", str(elsewhere))

    said = called("7")

    assert said.exit_code == 0
    assert f"{elsewhere / 'journal'} is not there: see node.state_dir" in said.output


@pytest.mark.parametrize("arguments", [["7"], ["7", "-o", "json"]])
def test_what_is_logged_stands_apart_from_what_is_printed(
    arguments: list[str],
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def logging(directory: Path, ledger_id: int) -> list[JournalRecord]:
        structlog.get_logger().error("journal.strange")
        return read_journal(directory, ledger_id)

    monkeypatch.setattr(restore_command, "read_journal", logging)
    with pytest.raises(SystemExit):
        restore(arguments)

    printed = capfd.readouterr()
    assert "journal.strange" not in printed.out
    assert "journal.strange" in printed.err
