"""Reading what a bookie stored from its journal."""

import struct
from pathlib import Path

import pytest

from bench.journals import added_bytes, records

HEADER = b"BKLG" + struct.pack(">i", 6) + bytes(504)
PADDING = -0x100


def record(ledger_id: int, entry_id: int, size: int) -> bytes:
    return struct.pack(">iqq", size, ledger_id, entry_id) + bytes(size - 16)


def padding(size: int) -> bytes:
    return struct.pack(">ii", PADDING, size) + bytes(size)


def journal(folder: Path, content: bytes) -> Path:
    (folder / "current").mkdir(exist_ok=True)
    path = folder / "current" / "1.txn"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "found"),
    [
        pytest.param(b"", [], id="a file just made"),
        pytest.param(HEADER, [], id="nothing added yet"),
        pytest.param(
            HEADER + record(7, 0, 40) + record(7, 1, 50), [(7, 0, 40), (7, 1, 50)], id="adds"
        ),
        pytest.param(
            HEADER + record(7, 0, 40) + padding(12) + record(8, 0, 60),
            [(7, 0, 40), (8, 0, 60)],
            id="padding between flushes is passed over",
        ),
        pytest.param(
            HEADER + record(7, 0, 40) + bytes(400), [(7, 0, 40)], id="zeros: the file was made long"
        ),
        pytest.param(
            HEADER + record(7, 0, 40) + record(7, 1, 50)[:30],
            [(7, 0, 40)],
            id="killed in mid-record",
        ),
    ],
)
def test_records_are_read_up_to_where_the_bookie_stopped(
    content: bytes, found: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    path = journal(tmp_path, content)

    assert list(records(path)) == found


def test_only_copies_of_entries_count(tmp_path: Path) -> None:
    fence, other_ledger = record(7, -0x2000, 20), record(8, 0, 60)
    journal(tmp_path, HEADER + record(7, 0, 40) + fence + other_ledger + record(7, 0, 40))

    assert added_bytes(tmp_path, {7}, since_s=0) == 80


def test_a_journal_that_was_finished_before_is_not_read(tmp_path: Path) -> None:
    path = journal(tmp_path, HEADER + record(7, 0, 40))

    assert added_bytes(tmp_path, {7}, since_s=path.stat().st_mtime + 1) == 0
