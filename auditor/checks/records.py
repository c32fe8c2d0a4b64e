"""The kinds of periodic checks, and the records of their progress and results:
``<ur>/bookmender/checks/<name>``.

A new leader continues a run from its record. The time of the last run, which Java's auditor reads
too, is in a znode of Java's (``last_run_ms``).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from auditor.settings import ChecksSettings
from ledgers.errors import CorruptionError, NoNodeError
from ledgers.store import ANY_VERSION, Create, MetadataStore, SetData
from replication import znodes
from replication.transactions import Batcher
from replication.znodes import (
    Audit,
    ClusterPaths,
    as_int,
    as_text,
    int_field,
    object_field,
    read_record,
    text_field,
    time_field,
)

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    """One run, in progress or finished. Times are wall-clock milliseconds.

    ``cursor``: ledgers with lower ids were checked. ``ledgers_left``: as of the last write.
    ``active_ms``: duration without pauses and changes of leader.
    """

    started_ms: int
    finished_ms: int | None = None
    cursor: int = 0
    ledger_count: int = 0
    ledgers_left: int = 0
    active_ms: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Outcomes by kind."""
    pause: str = ""
    """Why the run is paused now; empty if it is not."""

    @property
    def ledgers_per_s(self) -> float | None:
        """None if not known yet."""
        if self.ledger_count == 0 or self.active_ms == 0:
            return None
        return self.ledger_count * 1000 / self.active_ms

    @property
    def remaining_s(self) -> float | None:
        """Estimated from the speed so far; None if not known yet."""
        speed = self.ledgers_per_s
        return None if speed is None else self.ledgers_left / speed

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Self:
        """Raises CorruptionError."""
        counts = object_field(record, "counts")
        is_over = record.get("finished_ms") is not None
        return cls(
            started_ms=time_field(record, "started_ms"),
            finished_ms=time_field(record, "finished_ms") if is_over else None,
            cursor=int_field(record, "cursor"),
            ledger_count=int_field(record, "ledger_count"),
            ledgers_left=int_field(record, "ledgers_left"),
            active_ms=int_field(record, "active_ms"),
            counts={as_text(k, "count"): as_int(v, "count") for k, v in counts.items()},
            pause=text_field(record, "pause"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord:
    """The progress of one check. ``running``: the unfinished run, even if no leader is continuing
    it now. ``last``: the last finished run."""

    running: CheckRun | None = None
    last: CheckRun | None = None
    last_ms: int | None = None
    """For a check that Java does not have: the time of the last run, as its znode would hold it
    (``runner.due_in_s``)."""

    def unfinished(self, last_ms: int | None) -> CheckRun | None:
        """Return the run to continue. ``last_ms``: when a run was last finished.

        Return None also if Java's auditor led meanwhile and finished a run after this one began.
        """
        if self.running is not None and (last_ms is None or last_ms <= self.running.started_ms):
            return self.running
        return None

    def finished(self, now_ms: int) -> "CheckRecord":
        assert self.running is not None, self
        last = replace(self.running, finished_ms=now_ms, ledgers_left=0, pause="")
        return CheckRecord(last=last, last_ms=now_ms)

    def to_json(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Self:
        """Raises CorruptionError."""
        if record.get("version") != VERSION:
            raise CorruptionError("this release does not know this version of a check's record")
        given = {key: record.get(key) is not None for key in ("running", "last", "last_ms")}
        return cls(
            running=CheckRun.parse(object_field(record, "running")) if given["running"] else None,
            last=CheckRun.parse(object_field(record, "last")) if given["last"] else None,
            last_ms=time_field(record, "last_ms") if given["last_ms"] else None,
        )


async def read_check(store: MetadataStore, paths: ClusterPaths, name: str) -> CheckRecord:
    """Return the record of a check; an empty one if there is none or it cannot be read."""
    return await read_record(store, paths.check(name), CheckRecord.parse) or CheckRecord()


async def last_run_ms(
    store: MetadataStore, paths: ClusterPaths, name: str, audit: Audit | None
) -> int | None:
    """Return when any auditor last finished the check; None if never, or if the time cannot be
    read."""
    if audit is None:
        return (await read_check(store, paths, name)).last_ms
    try:
        data, _ = await store.get(paths.audit_time(audit))
        return znodes.parse_audit_time(data)
    except (NoNodeError, CorruptionError):
        return None


class CheckRecords:
    """Writes records through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths

    async def read(self, name: str) -> CheckRecord:
        return await read_check(self._store, self._paths, name)

    async def last_run_ms(self, name: str, audit: Audit | None) -> int | None:
        return await last_run_ms(self._store, self._paths, name, audit)

    async def write(self, name: str, record: CheckRecord) -> None:
        await self._commit({self._paths.check(name): record.to_json()})

    async def write_finished(self, name: str, record: CheckRecord, audit: Audit | None) -> None:
        """Write the record, and the time that Java reads, in one transaction."""
        assert record.last_ms is not None, record
        written = {self._paths.check(name): record.to_json()}
        if audit is not None:
            time_data = znodes.audit_time_to_bytes(record.last_ms)
            written[self._paths.audit_time(audit)] = time_data
        await self._commit(written)

    async def _commit(self, written: Mapping[str, bytes]) -> None:
        """Create or replace these znodes."""
        parent = self._paths.checks
        operations: list[Create | SetData] = []
        if await self._store.exists(parent) is None:
            operations.append(Create(path=parent))
        for path, data in written.items():
            is_there = await self._store.exists(path) is not None
            operations.append(
                SetData(path=path, data=data, version=ANY_VERSION)
                if is_there
                else Create(path=path, data=data)
            )
        await self._batcher.apply(*operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckKind:
    """``name``: as commands and our znodes show it. ``about``: what the check does, for people."""

    name: str
    about: str
    audit: Audit | None = None
    """The Java znode that holds the time of the last run; None: only our record holds it."""
    interval_of: Callable[[ChecksSettings], float]
    """Seconds between the end of a run and the start of the next. 0: only on request."""


ALL_LEDGERS = CheckKind(
    name="all-ledgers",
    about="reads entries of every copy of every ledger, and marks ledgers with damaged copies",
    audit=Audit.ALL_LEDGERS,
    interval_of=lambda settings: settings.all_ledgers_interval_s,
)
REPLICAS = CheckKind(
    name="replicas",
    about="counts the copies of every entry of every closed ledger, and marks ledgers that lack some",
    audit=Audit.REPLICAS,
    interval_of=lambda settings: settings.replicas_interval_s,
)
PLACEMENT = CheckKind(
    name="placement",
    about="compares where copies are with the placement policy",
    audit=Audit.PLACEMENT_POLICY,
    interval_of=lambda settings: settings.placement_interval_s,
)
IDLE_OPEN = CheckKind(
    name="idle-open",
    about="finds open ledgers without a writer",
    interval_of=lambda settings: settings.idle_open_after_s,
)
RECENT_COPIES = CheckKind(
    name="recent-copies",
    about="reads the copies of recent repairs again, once the bookies have flushed",
    interval_of=lambda settings: 0,
)
"""Not a ``Check``: reads what repairs recorded (``auditor.recheck``), and cannot be requested."""
OVERDUE = "overdue"
"""Not a ``Check``: reads marks (``overdue``), and cannot be requested."""

KINDS = (ALL_LEDGERS, REPLICAS, PLACEMENT, IDLE_OPEN)
