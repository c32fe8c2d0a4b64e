"""``bookmender ledger restore`` without a cluster: what it lists, and what it refuses."""

import json
import os
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner, Result

from daemon.cli import ledger as ledger_command
from daemon.cli.ledger import restore
from daemon.operations import restore as restoring
from daemon.operations.restore import Restored, answer_of
from ledgers.codec.metadata import serialize_metadata
from ledgers.errors import RejectedError
from ledgers.store import Stat
from replication.by_hand import CopyDoubt, Restoring
from replication.copy_reader import Verdict
from replication.journal import JournalRecord, MetadataJournal, read_journal
from tests.replication.ledger_values import B1, B2, B3, B4, closed_ledger

WRITTEN_MS = 1_700_000_000_000
BEFORE, AFTER = (
    serialize_metadata(closed_ledger(ensemble)) for ensemble in ((B1, B2, B3), (B1, B4, B3))
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a journal that has one write of ledger 7."""
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


def test_the_json_says_what_each_write_changed(state: Path) -> None:
    record = json.loads(called("7", "-o", "json").output)

    [write] = record["writes"]
    assert write["before"] == ["CLOSED, last entry 9", f"from entry 0: {B1}, {B2}, {B3}"]
    assert write["after"] == ["CLOSED, last entry 9", f"from entry 0: {B1}, {B4}, {B3}"]


def test_each_write_is_listed_with_its_cluster(state: Path) -> None:
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
    assert "recorded no write of ledger 7 at 1" in str(said.exception)


@pytest.mark.parametrize("option", ["--yes", "--force"])
def test_undoing_needs_the_time_of_a_write(option: str, state: Path) -> None:
    said = called("7", option)

    assert said.exit_code == 2
    assert "Name the write to undo with --at" in said.output


DOUBT = CopyDoubt(bookie=B2, verdict=Verdict.BOOKIE_ABSENT)


@pytest.mark.parametrize(
    ("doubts", "options", "said", "code"),
    [
        pytest.param((), [], "nothing was changed. --yes restores it", 0, id="no doubt"),
        pytest.param((DOUBT,), [], "--yes --force restores it", 1, id="in doubt"),
        pytest.param((DOUBT,), ["--force"], "--yes --force restores it", 0, id="forced"),
    ],
)
def test_a_preview_names_the_options_and_exits_like_them(
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    doubts: tuple[CopyDoubt, ...],
    options: list[str],
    said: str,
    code: int,
) -> None:
    [record] = read_journal(state / "journal", 7)
    now, was = closed_ledger((B1, B4, B3)), closed_ledger((B1, B2, B3))

    async def look(*_: object, **__: object) -> Restored:
        return answer_of(
            Restoring(
                record=record,
                was=was,
                present=AFTER,
                now=now,
                stat=Stat(version=1),
                copy_doubts=doubts,
            )
        )

    monkeypatch.setattr(ledger_command, "look_before_restoring", look)

    shown = called("7", "--at", str(record.time_ms), *options)
    assert said in shown.output
    assert shown.exit_code == code


def test_without_a_journal_the_missing_path_is_named(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = state / "elsewhere"
    monkeypatch.setenv("BOOKMENDER_NODE_STATE_DIR", str(elsewhere))

    said = called("7")

    assert said.exit_code == 0
    assert f"{elsewhere / 'journal'} does not exist. Check node.state_dir" in said.output


@pytest.mark.parametrize("arguments", [["7"], ["7", "-o", "json"]])
def test_logs_do_not_mix_with_the_output(
    arguments: list[str],
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def logging(directory: Path, ledger_id: int) -> list[JournalRecord]:
        structlog.get_logger().error("journal.strange")
        return read_journal(directory, ledger_id)

    monkeypatch.setattr(restoring, "read_journal", logging)
    with pytest.raises(SystemExit):
        restore(arguments)

    printed = capfd.readouterr()
    assert "journal.strange" not in printed.out
    assert "journal.strange" in printed.err
