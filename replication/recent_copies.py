"""Records of recent copies, which must be read again.

A bookie can acknowledge a copy and lose it silently afterwards. BookKeeper's DbLedgerStorage does
so. When its garbage collector deletes a ledger, EntryLocationIndex only notes the ledger id. The
next checkpoint (up to ``flushInterval`` later) removes the index of every entry of that ledger,
also of entries that were added in between. So a copy is proven only if it still exists after the
checkpoint (rule S6).

Before a repair writes metadata that names a new bookie, it records (ledger, bookie) here:
``<ur>/bookmender/recent_copies/<session uuid>.<number>``, versioned JSON. The session that made the
copies reads them again later and deletes the record. If that session has ended, another node adopts
the record, so nothing is forgotten when a worker crashes. ``auditor/recheck.py`` does the reading.

Many repairs share a record: all that arrive while one record is being written go into the next.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Self

import structlog

from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    QuotaError,
    RejectedError,
    SessionLostError,
)
from ledgers.model import BookieId
from ledgers.store import Check, Create, MetadataStore, MultiFailed
from replication.records import Count, Record, decode
from replication.transactions import Batcher, guarded_multi
from replication.znodes import ACL_HINT, ClusterPaths, ensure_znode

log = structlog.get_logger()

LEDGERS_PER_RECORD_MAX = 1_000
"""Keeps a record below 25 KB for each target that it names."""


def session_of(record_name: str) -> str:
    """The uuid of the session that wrote a record (its znode's name below ``nodes``)."""
    return record_name.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentCopies(Record):
    """New copies by bookie, because hundreds of ledgers share a few targets."""

    ledgers_by_target: Mapping[BookieId, Sequence[Count]]

    @classmethod
    def of(cls, targets: Mapping[int, Collection[BookieId]]) -> Self:
        """``targets``: by ledger id, the bookies that its metadata came to name."""
        ledgers: dict[BookieId, list[int]] = {}
        for ledger_id, bookies in targets.items():
            for bookie in bookies:
                ledgers.setdefault(bookie, []).append(ledger_id)
        return cls(ledgers_by_target=ledgers)

    @property
    def targets(self) -> dict[int, frozenset[BookieId]]:
        """The targets of each ledger, as in ``of``."""
        targets: dict[int, set[BookieId]] = {}
        for target, ledger_ids in self.ledgers_by_target.items():
            for ledger_id in ledger_ids:
                targets.setdefault(ledger_id, set()).add(target)
        return {ledger_id: frozenset(bookies) for ledger_id, bookies in targets.items()}

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        copies = decode(data, cls)
        if not any(copies.ledgers_by_target.values()):
            raise CorruptionError("the record of copies names no ledger")
        return copies


@dataclass(slots=True, eq=False)
class CopyRecord:
    """One record, from the first copy that joins it until all its copies were read again."""

    targets: dict[int, set[BookieId]] = field(default_factory=dict)
    path: str | None = None
    """None before it is written, and where it is refused: then this process alone knows of the
    copies."""
    unread: int = 0
    """Repairs whose copies are yet to be read again. At 0 the record is deleted."""
    is_written: asyncio.Event = field(default_factory=asyncio.Event)
    """Set also when the write has failed."""
    error: BookmenderError | None = None

    def end(self, error: BookmenderError | None = None) -> None:
        self.error = error
        self.is_written.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesToRead:
    """The copies of one repair, which has ended, and the record that they are part of."""

    ledger_id: int
    targets: frozenset[BookieId]
    record: CopyRecord


@dataclass
class CopyRecorder:
    """Writes the records of one session's copies. ``run`` must be running."""

    store: MetadataStore
    batcher: Batcher
    paths: ClusterPaths
    _: KW_ONLY
    session: str
    """The uuid of the session's znode."""
    is_enabled: bool = True
    on_ended: Callable[[CopiesToRead], None] = field(
        default_factory=lambda: lambda ended: None, init=False
    )
    """Called when a repair that recorded copies has ended. May be set before ``run`` begins."""
    _waiting: deque[CopyRecord] = field(default_factory=deque, init=False)
    """Records that are still to be written; copies join the last one."""
    _arrived: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _numbers: Iterator[int] = field(default_factory=count, init=False)
    _has_told: bool = field(default=False, init=False)
    """The log already says that a record was refused."""

    async def run(self) -> None:
        """Write until cancelled. Raises SessionLostError."""
        try:
            while True:
                await self._arrived.wait()
                # Repairs that are ready in this turn share the record; more of them while writers
                # go first.
                await asyncio.sleep(self.batcher.linger_s)
                self._arrived.clear()
                while self._waiting:
                    await self._write(self._waiting.popleft())
        finally:
            for record in self._waiting:
                record.end(SessionLostError("stopped before the copies were recorded"))

    def join(self, ledger_id: int, targets: Collection[BookieId]) -> CopyRecord | None:
        """Add copies to a record, and return it. None: recording is disabled."""
        if not self.is_enabled:
            return None
        if not self._waiting or len(self._waiting[-1].targets) >= LEDGERS_PER_RECORD_MAX:
            self._waiting.append(CopyRecord())
        record = self._waiting[-1]
        record.targets.setdefault(ledger_id, set()).update(targets)
        self._arrived.set()
        return record

    async def _write(self, record: CopyRecord) -> None:
        """Write a record. A rejected record (ACLs, a quota) stops no repair, because this process
        knows its copies."""
        path = f"{self.paths.recent_copies}/{self.session}.{next(self._numbers)}"
        create = Create(path=path, data=RecentCopies.of(record.targets).to_json())
        try:
            try:
                await self.batcher.apply(create)
            except NoNodeError:  # the first record, or the directory was deleted by hand
                await ensure_znode(self.store, self.paths.recent_copies)
                await self.batcher.apply(create)
        except (RejectedError, QuotaError) as error:
            if not self._has_told:
                log.error("recent_copies.refused", path=path, error=str(error), next_step=ACL_HINT)
            self._has_told = True
            record.end()
        except BookmenderError as error:
            record.end(error)
            if isinstance(error, SessionLostError):
                raise
        except BaseException:  # cancelled
            record.end(SessionLostError("stopped while the copies were being recorded"))
            raise
        else:
            record.path = path
            record.end()


async def record_by_hand(
    store: MetadataStore,
    paths: ClusterPaths,
    *,
    ledger_id: int,
    targets: Collection[BookieId],
    session: Check,
    guards: Sequence[Check],
) -> None:
    """Record the targets that a command is about to write into metadata. Nodes read the copies
    again after the command has ended.

    ``session``: the check of the command's own session znode, whose name the record carries. Raises
    LockLostError, UnavailableError, and RejectedError where ZooKeeper refuses the record.
    """
    copies = RecentCopies.of({ledger_id: targets})
    path = f"{paths.recent_copies}/{session.path.rpartition('/')[2]}.{ledger_id}"
    await ensure_znode(store, paths.recent_copies)
    try:
        await guarded_multi(
            store, guards, [Create(path=path, data=copies.to_json())], ledger_id=ledger_id
        )
    except MultiFailed as failure:
        if not isinstance(failure.cause, NodeExistsError):  # else an earlier attempt recorded it
            raise failure.cause from failure


@dataclass(slots=True)
class RepairCopies:
    """The copies that one repair makes, round by round. The caller ends it."""

    _recorder: CopyRecorder
    _ledger_id: int
    _records: dict[CopyRecord, set[BookieId]] = field(default_factory=dict)

    def add(self, targets: Collection[BookieId]) -> None:
        """Begin to record copies on these bookies. Does not wait, so that the copy can go on beside
        it."""
        new = set(targets).difference(*self._records.values())
        if new and (record := self._recorder.join(self._ledger_id, new)) is not None:
            if record not in self._records:
                record.unread += 1
            self._records.setdefault(record, set()).update(new)

    async def wait_recorded(self) -> None:
        """Return when all of them are recorded. Raises UnavailableError: name none of them."""
        for record in self._records:
            await record.is_written.wait()
            if record.error is not None:
                raise record.error

    def end(self) -> None:
        """Report the end of the repair, successful or not."""
        for record, targets in self._records.items():
            self._recorder.on_ended(
                CopiesToRead(ledger_id=self._ledger_id, targets=frozenset(targets), record=record)
            )
        self._records.clear()
