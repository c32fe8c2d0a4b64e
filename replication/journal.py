"""A local record of every metadata write: the bytes before and after (rule S2).

JSON lines, so that a command can put a ledger's metadata back as it was (``restoring``). One file a process, so that
several daemons on a host never write into each other's lines; when it has grown to its bound it is
set aside, and the oldest files of all processes are deleted beyond a bound for all of them together.
A process whose file was deleted begins another one; one that wrote nothing leaves none behind.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """One write of a ledger's metadata. ``time_ms``: this host's wall clock; it tells records apart.

    ``cluster``: its instance id; None where it has none, or an older release did not record it.
    """

    time_ms: int
    ledger_id: int
    before: bytes
    after: bytes
    cluster: str | None = None


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """A record as it stands in the file. JSON has no bytes: they are in base64."""

    version: int = 1
    time_ms: int
    ledger_id: int
    before: bytes
    after: bytes
    cluster: str | None = None


FILE_BYTES_MAX = 64 * 1024 * 1024
BYTES_MAX = 8 * FILE_BYTES_MAX
"""Of all processes of this host. Not a number of files: a process that starts again and again has many."""


class MetadataJournal:
    """Appends to ``directory/metadata-<process>.jsonl``. Safe to call from several threads."""

    def __init__(
        self,
        directory: Path,
        *,
        process: str,
        file_bytes_max: int = FILE_BYTES_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """Raises OSError when the directory cannot be written to."""
        self._directory = directory
        self._path = directory / f"metadata-{process}.jsonl"
        self._file_bytes_max, self._bytes_max = file_bytes_max, bytes_max
        self._lock = threading.Lock()  # guards the file
        directory.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        self._delete_oldest()

    def of_cluster(self, cluster: str | None) -> Callable[[int, bytes, bytes], None]:
        """``record``, for the writes of one cluster, named by its instance id."""
        return partial(self.record, cluster=cluster)

    def record(
        self, ledger_id: int, before: bytes, after: bytes, *, cluster: str | None = None
    ) -> None:
        """Written to the file before the metadata is. Raises OSError: then nothing may be written."""
        line = _encode(
            _Line(
                time_ms=time.time_ns() // 1_000_000,
                ledger_id=ledger_id,
                before=before,
                after=after,
                cluster=cluster,
            )
        )
        with self._lock:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._file.close()
                self._file = self._path.open("ab")
            self._file.write(line + b"\n")
            self._file.flush()
            if self._file.tell() >= self._file_bytes_max:
                self._rotate()

    def close(self) -> None:
        with self._lock:
            is_empty = self._file.tell() == 0
            self._file.close()
            if is_empty:
                self._path.unlink(missing_ok=True)

    def _rotate(self) -> None:
        self._file.close()
        self._path.rename(self._path.with_suffix(f".{time.time_ns()}.jsonl"))
        self._file = self._path.open("ab")
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        """Those that do not fit beside the newer ones and a full file of our own."""
        files = [f for f in self._directory.glob("metadata-*.jsonl") if f != self._path]
        room = self._bytes_max - self._file_bytes_max
        for file, (_, size) in sorted(
            ((f, _modified_and_size(f)) for f in files), key=lambda each: each[1], reverse=True
        ):
            room -= size
            if room < 0:
                file.unlink(missing_ok=True)


def _modified_and_size(file: Path) -> tuple[float, int]:
    try:
        stat = file.stat()
    except FileNotFoundError:  # another process was quicker to delete it
        return 0.0, 0
    return stat.st_mtime, stat.st_size


def read_journal(directory: Path, ledger_id: int) -> list[JournalRecord]:
    """The recorded writes of a ledger by all processes of this host, in any cluster, the oldest first.

    A write may have been recorded and then not made: the record comes first. Lines that cannot be
    read (cut short by a crash, a later release's) are passed over. Raises OSError.
    """
    files = sorted(directory.glob("metadata-*.jsonl"))
    found = [record for file in files for record in _records(file, ledger_id)]
    return sorted(found, key=lambda record: record.time_ms)


def _records(file: Path, ledger_id: int) -> Iterator[JournalRecord]:
    wanted = re.compile(rb'"ledger_id": ?%d,' % ledger_id)  # spares decoding nearly all lines
    try:
        lines = file.open("rb")
    except FileNotFoundError:  # another process has just deleted it, being the oldest
        return
    with lines:
        for line in lines:
            if wanted.search(line) and (record := _record(line)) is not None:
                yield record


def _record(line: bytes) -> JournalRecord | None:
    try:
        found = _decode(line)
    except msgspec.MsgspecError:
        return None
    return JournalRecord(
        time_ms=found.time_ms,
        ledger_id=found.ledger_id,
        before=found.before,
        after=found.after,
        cluster=found.cluster,
    )


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Line).decode
