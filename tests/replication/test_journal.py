"""The journal of metadata writes: files, rotation, failures, and records of one event loop."""

import asyncio
import base64
import functools
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from ledgers.errors import JournalError
from replication import journal as journal_module
from replication.journal import (
    FOLDER_MODE,
    ClusterJournal,
    JournalRecord,
    MetadataJournal,
    read_journal,
)

P = ParamSpec("P")


def record(journal: MetadataJournal, ledger_id: int, before: bytes, after: bytes) -> None:
    journal.record([JournalRecord(time_ms=1, ledger_id=ledger_id, before=before, after=after)])


def test_a_hanging_write_does_not_stop_the_process_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replication.journal.CLOSE_TIMEOUT_S", 0.1)
    journal = MetadataJournal(tmp_path, process="worker")
    with journal._lock, capture_logs() as logs:
        ending = threading.Thread(target=journal.close)
        ending.start()
        ending.join(10)

    assert not ending.is_alive()
    assert [each["event"] for each in logs] == ["journal.close_timed_out"]
    journal.close()


def lines(directory: Path) -> list[tuple[int, bytes, bytes]]:
    """Return ledger id, before and after of every line of every file, the oldest file first."""
    files = sorted(directory.glob("*.jsonl"), key=lambda file: file.stat().st_mtime_ns)
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [
        (r["ledger_id"], base64.b64decode(r["before"]), base64.b64decode(r["after"]))
        for r in records
    ]


def test_rule_s2_both_versions_are_on_disk_when_it_returns(tmp_path: Path) -> None:
    journal = MetadataJournal(tmp_path / "new" / "journal", process="host-1")

    record(journal, 7, b"\x00before", b"\xffafter")

    assert lines(tmp_path / "new" / "journal") == [(7, b"\x00before", b"\xffafter")]
    journal.close()


def test_a_restarted_process_continues_its_file(tmp_path: Path) -> None:
    for ledger_id in (1, 2):
        journal = MetadataJournal(tmp_path, process="host-1")
        record(journal, ledger_id, b"", b"x")
        journal.close()

    assert [ledger_id for ledger_id, _, _ in lines(tmp_path)] == [1, 2]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_file_is_rotated_and_no_line_is_lost(tmp_path: Path) -> None:
    journal = MetadataJournal(tmp_path, process="host-1", file_bytes_max=500)

    for ledger_id in range(20):
        record(journal, ledger_id, bytes(50), bytes(50))

    assert len(list(tmp_path.iterdir())) > 3
    assert sorted(ledger_id for ledger_id, _, _ in lines(tmp_path)) == list(range(20))
    journal.close()


def test_the_oldest_files_of_all_processes_are_deleted_first(tmp_path: Path) -> None:
    """Together they stay within the bound."""
    for number in range(6):
        file = tmp_path / f"metadata-old-{number}.jsonl"
        file.write_bytes(bytes(100))
        os.utime(file, (number, number))

    journal = MetadataJournal(tmp_path, process="host-1", file_bytes_max=200, bytes_max=500)

    assert {file.name for file in tmp_path.iterdir()} == {
        "metadata-host-1.jsonl",
        "metadata-old-3.jsonl",
        "metadata-old-4.jsonl",
        "metadata-old-5.jsonl",
    }
    journal.close()


def test_rule_s2_failed_starts_displace_no_record(tmp_path: Path) -> None:
    journal = MetadataJournal(tmp_path, process="host-0")
    record(journal, 7, b"before", b"after")
    journal.close()

    for pid in range(1, 50):
        MetadataJournal(tmp_path, process=f"host-{pid}").close()

    assert lines(tmp_path) == [(7, b"before", b"after")]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_process_whose_file_was_deleted_begins_a_new_one(tmp_path: Path) -> None:
    journal = MetadataJournal(tmp_path, process="host-1")
    record(journal, 1, b"", b"")
    (tmp_path / "metadata-host-1.jsonl").unlink()

    record(journal, 2, b"", b"")

    assert [ledger_id for ledger_id, _, _ in lines(tmp_path)] == [2]
    journal.close()


def test_a_deleted_folder_is_created_again(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "journal"
    journal = MetadataJournal(folder, process="host-1")
    record(journal, 1, b"", b"")
    shutil.rmtree(tmp_path / "state")

    record(journal, 2, b"", b"")

    assert [ledger_id for ledger_id, _, _ in lines(folder)] == [2]
    assert folder.stat().st_mode & 0o777 == FOLDER_MODE
    journal.close()


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    journal = MetadataJournal(tmp_path, process="host-1", file_bytes_max=20_000)

    def write(thread: int) -> None:
        for number in range(50):
            record(journal, 1000 * thread + number, bytes(100), bytes(100))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    assert sorted(ledger_id for ledger_id, _, _ in lines(tmp_path)) == [
        1000 * thread + number for thread in range(4) for number in range(50)
    ]
    journal.close()


def test_a_folder_that_cannot_be_created_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        MetadataJournal(tmp_path / "file" / "journal", process="host-1")


def test_the_writes_of_a_ledger_are_read_from_all_files(tmp_path: Path) -> None:
    one, two = (MetadataJournal(tmp_path, process=name) for name in ("a-1", "b-2"))
    record(one, 7, b"first", b"second")
    record(two, 77, b"another's", b"")
    record(two, 7, b"second", b"third")
    with (tmp_path / "metadata-a-1.jsonl").open("a") as file:
        file.write('{"version": 1, "ledger_id": 7, "time_ms": 1, "befo')  # a crash cut it short

    found = read_journal(tmp_path, 7)

    assert [(r.ledger_id, r.before, r.after) for r in found] == [
        (7, b"first", b"second"),
        (7, b"second", b"third"),
    ]
    assert found[0].time_ms <= found[1].time_ms
    one.close()
    two.close()


def test_a_line_without_a_cluster_id_is_read(tmp_path: Path) -> None:
    (tmp_path / "metadata-old-1.jsonl").write_text(
        '{"version":1,"time_ms":5,"ledger_id":7,"before":"AA==","after":"AQ=="}\n'
    )

    assert read_journal(tmp_path, 7) == [
        JournalRecord(time_ms=5, ledger_id=7, before=b"\x00", after=b"\x01", cluster=None)
    ]


def test_a_missing_journal_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_journal(tmp_path / "none", 7)


# --- Of one cluster, and one event loop -----------------------------------------------------------


def in_real_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A thread writes, and takes the time that it takes."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@in_real_time
async def test_each_record_names_its_cluster(tmp_path: Path) -> None:
    journal = MetadataJournal(tmp_path, process="host-1")
    for number, cluster in enumerate(["here", "there", None]):
        await ClusterJournal(journal, cluster).record(7, b"", bytes(number))

    assert [record.cluster for record in read_journal(tmp_path, 7)] == ["here", "there", None]
    journal.close()


class OneWrite(MetadataJournal):
    """Remembers which records were written together. It stores nothing while it is full."""

    is_full = False

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    def record(self, records: Sequence[JournalRecord]) -> None:
        if self.is_full:
            raise JournalError("free disk space there")
        self.written.append([record.ledger_id for record in records])


@in_real_time
async def test_records_of_one_turn_of_the_loop_are_written_together() -> None:
    files = OneWrite()
    journal = ClusterJournal(files, "here")

    await asyncio.gather(*(journal.record(ledger_id, b"", b"x") for ledger_id in range(3)))
    await journal.record(3, b"", b"x")

    assert files.written == [[0, 1, 2], [3]]


@in_real_time
async def test_rule_s2_a_failed_write_fails_all_its_callers() -> None:
    files = OneWrite()
    journal = ClusterJournal(files, "here")
    files.is_full = True

    told = await asyncio.gather(
        *(journal.record(ledger_id, b"", b"x") for ledger_id in range(3)), return_exceptions=True
    )

    assert [type(error) for error in told] == [JournalError] * 3
    files.is_full = False
    await journal.record(3, b"", b"x")
    assert files.written == [[3]]


@in_real_time
async def test_a_cancelled_caller_does_not_disturb_the_others() -> None:
    files = OneWrite()
    journal = ClusterJournal(files, "here")
    waiting = [asyncio.ensure_future(journal.record(i, b"", b"x")) for i in range(2)]
    await asyncio.sleep(0)  # they have begun, and nothing is written yet

    waiting[0].cancel()
    told = await asyncio.gather(*waiting, return_exceptions=True)

    assert isinstance(told[0], asyncio.CancelledError)
    assert told[1] is None
    assert files.written[0][-1] == 1


class Hanging(MetadataJournal):
    """A journal on a disk that hangs until the test goes on."""

    goes_on: threading.Event

    def _append(self, lines: bytes) -> None:
        self.goes_on.wait()
        super()._append(lines)


@in_real_time
async def test_a_disk_that_hangs_blocks_no_loop_and_fails_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Hanging(tmp_path, process="host-1")
    files.goes_on = threading.Event()
    journal = ClusterJournal(files, "here")
    monkeypatch.setattr(journal_module, "WRITE_MAX_S", 0.05)

    with capture_logs() as logs:
        for ledger_id in (1, 2):
            with pytest.raises(JournalError, match="the disk does not answer"):
                await journal.record(ledger_id, b"", b"x")
        monkeypatch.undo()
        files.goes_on.set()
        await journal.record(3, b"", b"x")

    assert [line["event"] for line in logs] == ["journal.unwritable", "journal.writable"]
    assert [ledger_id for ledger_id, _, _ in lines(tmp_path)] == [1, 3]
    files.close()


# --- A disk that is full --------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Bound the size of files, as on a disk that fills up: writes fail, or are partial."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_write_names_the_folder_and_leaves_no_rest(tmp_path: Path) -> None:
    journal = MetadataJournal(tmp_path, process="host-1")
    record(journal, 1, b"", b"one")

    refused = pytest.raises(JournalError, match=str(tmp_path))
    with capture_logs(), files_of_at_most(150), refused:
        record(journal, 2, bytes(100), b"two")
    record(journal, 3, b"", b"three")

    assert [ledger_id for ledger_id, _, _ in lines(tmp_path)] == [1, 3]
    journal.close()


def test_a_metric_tells_that_the_journal_cannot_be_written(tmp_path: Path) -> None:
    journal = MetadataJournal(tmp_path, process="host-1")
    seen = []
    with capture_logs(), files_of_at_most(150), suppress(JournalError):
        record(journal, 2, bytes(100), b"two")
    seen.append(REGISTRY.get_sample_value("bookmender_journal_unwritable"))
    with capture_logs():
        record(journal, 3, b"", b"three")
    seen.append(REGISTRY.get_sample_value("bookmender_journal_unwritable"))

    assert seen == [1, 0]
    journal.close()


def test_failing_writes_are_logged_once_and_their_end_once(tmp_path: Path) -> None:
    journal = MetadataJournal(tmp_path, process="host-1")

    with capture_logs() as logs:
        for _ in range(3):
            with files_of_at_most(0), pytest.raises(JournalError):
                record(journal, 1, b"", b"")
        record(journal, 1, b"", b"")
        record(journal, 1, b"", b"")

    assert [line["event"] for line in logs] == ["journal.unwritable", "journal.writable"]
    assert logs[0]["path"].startswith(str(tmp_path))
    assert "free disk space" in logs[0]["next_step"]
    journal.close()


@pytest.mark.parametrize("room_bytes", [0, 150], ids=["none", "too little for a record"])
def test_an_unwritable_journal_is_logged_at_start(tmp_path: Path, room_bytes: int) -> None:
    """The first record is tried all the same."""
    journal = MetadataJournal(tmp_path, process="host-1")

    with capture_logs() as logs:
        with files_of_at_most(room_bytes):
            journal.try_out()
        record(journal, 1, b"", b"x")

    assert [line["event"] for line in logs] == ["journal.unwritable", "journal.writable"]
    assert [ledger_id for ledger_id, _, _ in lines(tmp_path)] == [1]
    journal.close()


def test_a_successful_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    tried = MetadataJournal(tmp_path, process="host-1")
    with capture_logs() as logs:
        tried.try_out()
    tried.close()
    assert (logs, list(tmp_path.iterdir())) == ([], [])

    kept = MetadataJournal(tmp_path, process="host-1")
    record(kept, 1, b"", b"x")
    kept.try_out()
    record(kept, 2, b"", b"x")
    kept.close()

    assert [ledger_id for ledger_id, _, _ in lines(tmp_path)] == [1, 2]


def test_a_line_cut_short_by_a_crash_spoils_no_later_line(tmp_path: Path) -> None:
    (tmp_path / "metadata-host-1.jsonl").write_bytes(b'{"version":1,"time_ms":1,"ledger_id":1,"bef')
    journal = MetadataJournal(tmp_path, process="host-1")
    record(journal, 1, b"before", b"after")
    journal.close()

    assert [record.after for record in read_journal(tmp_path, 1)] == [b"after"]


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_folder_and_files_are_readable_by_their_owner_only(tmp_path: Path, umask: int) -> None:
    """Existing ones too."""
    directory = tmp_path / "journal"
    directory.mkdir(mode=0o755)
    old = directory / "metadata-host-0.jsonl"
    old.touch(mode=0o644)
    before = os.umask(umask)
    try:
        journal = MetadataJournal(directory, process="host-1", file_bytes_max=100)
        for _ in range(3):
            record(journal, 1, b"", bytes(100))
        journal.close()
    finally:
        os.umask(before)

    assert directory.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o600}
    assert len(list(directory.iterdir())) > 2
