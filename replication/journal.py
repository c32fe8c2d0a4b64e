"""A local record of every metadata write: the bytes before and after (rule S2).

The record lets a command restore a ledger's metadata (``restore``). It is a file of JSON lines for
each process, so that several daemons of a host never write into each other's lines. A file that
reaches its maximum size is renamed, and the oldest files of all processes are deleted beyond a
total maximum. A process whose file or folder was deleted creates it again; a process that wrote
nothing leaves no file. Only the owner may read the folder and the files.
"""

import asyncio
import errno
import io
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import structlog
from prometheus_client import Gauge

from ledgers.errors import JournalError, LocalLimitError
from ledgers.tasks import in_daemon_thread

log = structlog.get_logger()
UNWRITABLE = Gauge(
    "bookmender_journal_unwritable",
    "1 while the journal of metadata writes cannot be written, so this node changes no metadata; "
    "else 0.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """One write of a ledger's metadata: a line of the file, with bytes in base64.

    ``time_ms``: this host's wall clock; it identifies the record. ``cluster``: the instance id of
    the cluster; None if it has none.
    """

    version: int = 1
    time_ms: int
    ledger_id: int
    before: bytes
    after: bytes
    cluster: str | None = None


FILE_BYTES_MAX = 64 * 1024 * 1024
BYTES_MAX = 8 * FILE_BYTES_MAX
"""Total size of the files of all processes. Not a number of files, because a process that restarts
often has many."""
WRITE_MAX_S = 15.0
"""Time that the disk has for a record."""
CLOSE_TIMEOUT_S = 1.0
"""Time that ``close`` waits for another thread's write."""
FILE_MODE, FOLDER_MODE = 0o600, 0o700
_TRIED = b"\n" * 4096
"""Empty lines, as long as a record. Readers skip these empty lines if a crash leaves them in the
file."""


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
        self._lock = threading.Lock()  # guards the file and the flag below
        self._has_failed = False
        """True if the last write failed."""
        _make_private(directory)
        self._file = self._open()
        self._delete_oldest()

    def record(self, records: Sequence[JournalRecord]) -> None:
        """Write all records or none, before the metadata is written. Raises JournalError; then the
        metadata must not be written."""
        lines = b"".join(_encode(record) + b"\n" for record in records)
        with self._lock:
            try:
                self._append(lines)
                self._note(None)
            except OSError as error:
                hint = LocalLimitError.of(error) or "Free disk space"
                raise self._failed(error, hint) from error

    def hangs(self) -> JournalError:
        """Log that the disk does not answer, and return the error of the callers that waited."""
        # Without the lock, which the write that hangs holds.
        error = OSError(errno.ETIMEDOUT, "the disk does not answer")
        return self._failed(error, "Check the disk")

    def _failed(self, error: OSError, hint: object) -> JournalError:
        self._note(error)
        return JournalError(
            f"cannot write to {self._directory} on this host: {error.strerror}. Metadata is "
            f"changed only after the old metadata is recorded there. {hint}"
        )

    def try_out(self) -> None:
        """Write and remove a test record, and log if that begins or ceases to fail."""
        with self._lock:
            try:
                self._append(_TRIED)
                self._file.truncate(os.fstat(self._file.fileno()).st_size - len(_TRIED))
                self._note(None)
            except OSError as error:
                self._note(error)

    def _append(self, lines: bytes) -> None:
        """Write all lines or none. Raises OSError."""
        # Few system calls, because each lets other threads run first.
        file = os.fstat(self._file.fileno())
        is_full = file.st_size >= self._file_bytes_max
        if file.st_nlink == 0 or is_full:
            if file.st_nlink == 0:
                _make_private(self._directory)  # the whole folder may have been deleted
            else:
                with suppress(FileNotFoundError):  # an earlier rotation may have stopped half-way
                    self._path.rename(self._path.with_suffix(f".{time.time_ns()}.jsonl"))
            former, self._file = self._file, self._open()
            former.close()
            self._delete_oldest()
        try:
            rest = lines
            while rest:  # a disk that fills up accepts only a part
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(os.fstat(self._file.fileno()).st_size - len(lines) + len(rest))
            raise

    def _note(self, error: OSError | None) -> None:
        """Log when writes begin to fail, and when they succeed again."""
        has_failed = error is not None
        if has_failed is not self._has_failed:
            UNWRITABLE.set(has_failed)
            if error is None:
                log.info("journal.writable", path=str(self._path))
            else:
                log.error(
                    "journal.unwritable",
                    path=str(self._path),
                    error=error.strerror,
                    next_step="free disk space, check the disk, or grant the service user write "
                    "access; until then this node changes no metadata",
                )
        self._has_failed = has_failed

    def close(self) -> None:
        """Close the file. Does not wait for long if another thread's write hangs."""
        if not self._lock.acquire(timeout=CLOSE_TIMEOUT_S):
            log.error("journal.close_timed_out", path=str(self._path))
            return
        try:
            is_empty = os.fstat(self._file.fileno()).st_size == 0
            self._file.close()
            if is_empty:
                self._path.unlink(missing_ok=True)
        finally:
            self._lock.release()

    def _open(self) -> io.FileIO:
        """Open the file unbuffered, so that a failed write is not repeated later by a buffer."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, FILE_MODE)
        file = io.FileIO(fd, "ab")
        try:
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(fd, 1, size - 1) != b"\n":  # a crash cut the last line short
                file.write(b"\n")
        except OSError:
            file.close()
            raise
        return file

    def _delete_oldest(self) -> None:
        """Delete the oldest files beyond the total maximum, minus a full file of our own."""
        found: list[tuple[float, int, Path]] = []
        for file in self._directory.glob("metadata-*.jsonl"):
            with suppress(FileNotFoundError):  # another process deleted it
                if file != self._path:
                    stat = file.stat()
                    found.append((stat.st_mtime, stat.st_size, file))
        room = self._bytes_max - self._file_bytes_max
        for _, size, file in sorted(found, reverse=True):
            room -= size
            if room < 0:
                file.unlink(missing_ok=True)


@dataclass(slots=True, eq=False)
class ClusterJournal:
    """The journal for the writes of one event loop in one cluster.

    A thread writes, because a disk may hang, and the loop must go on. Records that come meanwhile
    are written together by the next thread.
    """

    journal: MetadataJournal
    cluster: str | None
    """The instance id of the cluster."""
    _waiting: dict[asyncio.Future[None], JournalRecord] = field(default_factory=dict, init=False)
    _writing: asyncio.Task[None] | None = field(default=None, init=False)

    async def record(self, ledger_id: int, before: bytes, after: bytes) -> None:
        """Write a record. Raises what ``MetadataJournal.record`` raises, also if the disk does not
        answer for ``WRITE_MAX_S``. The record may then still be written."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[written] = JournalRecord(
            time_ms=time.time_ns() // 1_000_000,
            ledger_id=ledger_id,
            before=before,
            after=after,
            cluster=self.cluster,
        )
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())
        try:
            async with asyncio.timeout(WRITE_MAX_S):
                await written
        except TimeoutError as error:
            raise self.journal.hangs() from error
        finally:
            self._waiting.pop(written, None)

    async def _write_all(self) -> None:
        """Write until nothing waits. Begins after the other records of this turn of the loop."""
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, {}
                failure: Exception | None = None
                try:
                    records = list(waiting.values())
                    await in_daemon_thread(partial(self.journal.record, records), name="journal")
                except (LocalLimitError, RuntimeError) as error:  # no thread could be started
                    failure = JournalError(str(error))
                except Exception as error:
                    failure = error
                for written in waiting:
                    if written.done():  # cancelled
                        continue
                    if failure is None:
                        written.set_result(None)
                    else:
                        written.set_exception(failure)
        finally:
            self._writing = None


def _make_private(directory: Path) -> None:
    """Create the folder, and restrict it and its files to the owner: metadata contains the
    passwords of ledgers in clear text."""
    directory.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    for path in (directory, *directory.glob("metadata-*.jsonl")):
        mode = FOLDER_MODE if path == directory else FILE_MODE
        # Another owner may have the file, or another process may have deleted it.
        with suppress(PermissionError, FileNotFoundError):
            if path.stat().st_mode & 0o777 & ~mode:
                path.chmod(mode)


def read_journal(directory: Path, ledger_id: int) -> list[JournalRecord]:
    """Return the recorded writes of a ledger by all processes of this host, oldest first.

    A recorded write may not have been made, because the record is written first. Unreadable lines
    (cut short by a crash, or of a later release) are skipped. Raises OSError, also if the directory
    does not exist.
    """
    os.listdir(directory)  # glob ignores a directory that may not be read
    wanted = re.compile(rb'"ledger_id": ?%d,' % ledger_id)  # saves decoding nearly all lines
    found: list[JournalRecord] = []
    for file in sorted(directory.glob("metadata-*.jsonl")):
        # Another process may have just deleted the oldest file.
        with suppress(FileNotFoundError), file.open("rb") as lines:
            for line in filter(wanted.search, lines):
                with suppress(ValueError, RecursionError):
                    found.append(_decode(line))
    return sorted(found, key=lambda record: record.time_ms)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(JournalRecord).decode
