"""The parts that all periodic checks share: their kinds, their interface, and the reports of
findings. Their progress and results are in the znodes ``<ur>/bookmender/checks/<name>``.

A new leader continues a run from its record. The time of the last run, which Java's auditor reads
too, is in a znode of Java's (``CheckKind.audit``).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from auditor.mark_reasons import Findings, JavaVisibility
from auditor.settings import ChecksSettings
from ledgers.store import ANY_VERSION, Create, MetadataStore, SetData
from replication import znodes
from replication.records import Count, Record, Stored, TimeMs, read_stored
from replication.transactions import Batcher
from replication.znodes import Audit, ClusterPaths

log = structlog.get_logger()

LOGGED_MAX = 20
"""Ledgers that one leader names in its log for each check. A broken disk may damage a hundred
thousand ledgers; the queue names all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    """One run, in progress or finished. Times are wall-clock milliseconds.

    ``cursor``: ledgers with lower ids were checked. ``ledgers_left``: as of the last write.
    ``active_ms``: duration without pauses and changes of leader.
    """

    started_ms: TimeMs
    finished_ms: TimeMs | None = None
    cursor: Count = 0
    ledger_count: Count = 0
    ledgers_left: Count = 0
    active_ms: Count = 0
    counts: Mapping[str, Count] = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord(Record):
    """The progress of one check. ``running``: the unfinished run, even if no leader is continuing
    it now. ``last``: the last finished run."""

    running: CheckRun | None = None
    last: CheckRun | None = None
    last_ms: TimeMs | None = None
    """For a check that Java does not have: the time of the last run, as its znode would hold it
    (``runner.due_in_s``)."""

    def unfinished(self, last_ms: int | None) -> CheckRun | None:
        """Return the run to continue; None if there is none.

        ``last_ms``: when a run was last finished, perhaps by Java's auditor. If that was after our
        run began, our run is not continued.
        """
        if self.running is not None and (last_ms is None or last_ms <= self.running.started_ms):
            return self.running
        return None

    def finished(self, now_ms: int) -> "CheckRecord":
        assert self.running is not None, self
        last = replace(self.running, finished_ms=now_ms, ledgers_left=0, pause="")
        return CheckRecord(last=last, last_ms=now_ms)


async def read_check(store: MetadataStore, paths: ClusterPaths, name: str) -> CheckRecord:
    """Return the record of a check; an empty one if there is none or it cannot be read."""
    return (await read_stored_check(store, paths, name)).value or CheckRecord()


async def read_stored_check(
    store: MetadataStore, paths: ClusterPaths, name: str
) -> Stored[CheckRecord]:
    return await read_stored(store, paths.check(name), CheckRecord.parse)


async def read_audit_time(
    store: MetadataStore, paths: ClusterPaths, audit: Audit
) -> Stored[int | None]:
    """Read the time of the last run, which Java's auditor reads too."""
    return await read_stored(store, paths.audit_time(audit), znodes.parse_audit_time)


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
    about="counts the copies of every entry of every closed ledger, and marks ledgers that lack "
    "some",
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

KINDS = (ALL_LEDGERS, REPLICAS, PLACEMENT, IDLE_OPEN)


class Check(ABC):
    """A periodic check that the leader runs. ``CheckRunner`` decides when it is due, stores its
    progress, and handles pauses and errors."""

    kind: CheckKind
    part_size: int = 500
    """Ledgers in one part. Progress is stored after each part."""
    at_once: int = 16
    """Ledgers that are checked concurrently."""

    async def begin(self, run: CheckRun) -> None:  # noqa: B027  # most have nothing to do
        """Prepare for a run. If ``run.cursor`` is above 0, an earlier leader began the run."""

    @abstractmethod
    async def check_ledger(self, ledger_id: int) -> Counter[str]:
        """Check a ledger. Return counts of the outcomes by kind.

        The ledger existed according to the ledger map; it may be deleted or unreadable by now. The
        call may be cancelled at any time, and is then repeated, perhaps by another leader. Only
        what it returns is counted. Raises UnavailableError, after which the call is repeated;
        CorruptionError or UnauthorizedError if the ledger is unreadable, and NoSuchLedgerError.
        """

    async def finish(self, run: CheckRun) -> None:  # noqa: B027  # see begin
        """Conclude a run after all ledgers were checked. ``run`` holds all counts."""


@dataclass
class FindingReporter:
    """Stores findings and marks their ledgers."""

    findings: Findings
    _logged: Counter[str] = field(default_factory=Counter, init=False)

    async def report(
        self, kind: CheckKind, ledger_id: int, visibility: JavaVisibility, detail: str
    ) -> Counter[str]:
        """Store the finding and mark the ledger (``Findings.mark``).

        Returns the counts ``found``, and ``marked`` (1 if a mark is new or names more bookies now).
        """
        has_changed = await self.findings.mark(ledger_id, kind.name, visibility, detail)
        if has_changed and self._logged[kind.name] < LOGGED_MAX:
            self._logged[kind.name] += 1
            log.warning("check.found", check=kind.name, ledger_id=ledger_id, what=detail)
        return Counter(found=1, marked=int(has_changed))


@dataclass
class CheckRecords:
    """Reads and writes records through ``batcher``, whose guards prove the leadership (rule S9)."""

    store: MetadataStore
    batcher: Batcher
    paths: ClusterPaths

    async def read(self, kind: CheckKind) -> tuple[CheckRecord, int | None]:
        """Return the record, and when any auditor last finished the check; None if never, or if the
        time cannot be parsed. Raises UnauthorizedError."""
        stored = await read_stored_check(self.store, self.paths, kind.name)
        record = stored.permitted_value or CheckRecord()
        if kind.audit is None:
            return record, record.last_ms
        return record, (await read_audit_time(self.store, self.paths, kind.audit)).permitted_value

    async def write(self, kind: CheckKind, record: CheckRecord) -> None:
        """Write the record; of a finished run, in one transaction with the time that Java reads."""
        written = {self.paths.check(kind.name): record.to_json()}
        if record.running is None and kind.audit is not None:
            assert record.last_ms is not None, record
            time_data = znodes.audit_time_to_bytes(record.last_ms)
            written[self.paths.audit_time(kind.audit)] = time_data
        operations: list[Create | SetData] = []
        if await self.store.exists(self.paths.checks) is None:
            operations.append(Create(path=self.paths.checks))
        for path, data in written.items():
            if await self.store.exists(path) is None:
                operations.append(Create(path=path, data=data))
            else:
                operations.append(SetData(path=path, data=data, version=ANY_VERSION))
        await self.batcher.apply(*operations)
