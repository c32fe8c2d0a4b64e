"""The counts of a run: ``summary.json`` in its results, for automation, and the znode
``<ur>/bookmender/fsck/last``, for the daemon's status and metrics.

The keys are stable: a new one keeps ``version``, a change of meaning raises it.

The znode ``closer`` beside ``last`` holds the summary of an earlier run at a closer level that
found something wrong. Until a run as close follows, it is unknown whether this was repaired. Each
summary in ZooKeeper also says how many ledgers were marked since, if any.
"""

import json
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import structlog
from prometheus_client import Gauge

from auditor.fsck.options import Level
from auditor.fsck.verdicts import Grade
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.plain_files import replace_file
from ledgers.store import ANY_VERSION, MetadataStore
from replication.records import Count, TimeMs, decode, read_record
from replication.znodes import ClusterPaths

VERSION = 1
EXIT_WHOLE, EXIT_WRONG, EXIT_UNKNOWN = 0, 1, 3
SUMMARY_FILE = "summary.json"
SUMMARIES = "summaries"


log = structlog.get_logger()
LEDGERS = Gauge(
    "bookmender_fsck_ledgers", "Ledgers checked by the last run of fsck, by verdict.", ["verdict"]
)
FINDINGS = Gauge(
    "bookmender_fsck_findings",
    "Ledgers with a finding of the last run of fsck, by finding.",
    ["finding"],
)
WRONG = Gauge(
    "bookmender_fsck_wrong_ledgers",
    "Wrong ledgers of the last run of fsck, or of an earlier run at a closer level if it "
    "found more.",
)
FINISHED = Gauge(
    "bookmender_fsck_finished_timestamp_seconds", "When the last run of fsck ended.", ["level"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of ledgers. Those of parts can be added. Keys are values of ``Grade`` and
    ``Finding``."""

    ledgers: Count = 0
    """Ledgers with a verdict of this run."""
    verdicts: Mapping[str, Count] = field(default_factory=dict)
    findings: Mapping[str, Count] = field(default_factory=dict)
    """A ledger with several findings counts for each."""
    wrong: Count = 0
    """Ledgers that need a repair or an operator."""
    resting_on_unknown: Count = 0
    entries_read: Count = 0
    bytes_read: Count = 0
    out_of_reach: Count = 0
    """Ledgers with entries that no running bookie has, but that are not known to be lost."""
    away: Mapping[str, Count] = field(default_factory=dict)
    """By bookie, how many of these ledgers have such entries there."""
    tails_unseen: Count = 0
    """Open ledgers whose entries after the last confirmed one, if any, were left to the writer and
    not checked."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{each.name: _added(self, other, each.name) for each in fields(Counts)})


def _added(ours: Counts, others: Counts, name: str) -> Any:
    """Return the sum of one field; of a mapping, the sums by key."""
    one, two = getattr(ours, name), getattr(others, name)
    if isinstance(one, int):
        return one + two
    return {key: one.get(key, 0) + two.get(key, 0) for key in {**one, **two}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of one run. Times are wall-clock."""

    run: str
    level: Level
    started_ms: TimeMs
    finished_ms: TimeMs
    counts: Counts = field(default_factory=Counts)
    """Stored beside the other fields."""
    left: Count = 0
    """Ledgers for which the time budget was too short."""
    left_wrong: Count = 0
    """Number of ledgers in ``left`` that were wrong when last checked."""
    gone: Count = 0
    """Ledgers that were deleted after the listing and before their check."""
    is_changed_only: bool = False
    """True if the run checked only ledgers that changed since an earlier run, and those that were
    wrong or unknown when last checked."""
    hidden: tuple[str, ...] = ()
    """The first directories of ledgers that ACLs hide. Their ledgers are not counted."""
    marked: Count | None = None
    """The greatest number of ledgers that were marked at once for the daemon after the run. None:
    no marks are known. Set only in ZooKeeper; the run itself does not know."""

    @property
    def is_complete(self) -> bool:
        """True if each ledger has a verdict, of this run or a recent one."""
        return self.left == 0 and not self.hidden

    @property
    def wrong(self) -> int:
        """Number of ledgers that need a repair or an operator, as far as known."""
        return self.counts.wrong + self.left_wrong

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 if something is, 3 if nothing is known to be wrong but a ledger
        is ``unknown``, or a directory is hidden.

        Legally missing copies and a used-up time budget do not count.
        """
        if self.wrong:
            return EXIT_WRONG
        is_unknown = self.counts.verdicts.get(Grade.UNKNOWN.value) or self.hidden
        return EXIT_UNKNOWN if is_unknown else EXIT_WHOLE

    def to_record(self) -> dict[str, Any]:
        record = {
            "version": VERSION,
            **asdict(self),
            **asdict(self.counts),
            "level": self.level.value,
            "is_complete": self.is_complete,
            "exit_code": self.exit_code,
            "hidden": list(self.hidden),
            "skipped": 0,  # earlier releases require it
        }
        del record["counts"]
        if self.marked is None:
            del record["marked"]
        return record

    def to_json(self) -> bytes:
        return json.dumps(self.to_record()).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return the summary. Raises CorruptionError, also for another version."""
        return replace(decode(data, cls), counts=decode(data, Counts))


# --- The files ------------------------------------------------------------------------------------


def write_summary(folder: Path, summary: Summary) -> None:
    """Write the summary of the last run, and a copy beside those of earlier runs. Each file is
    replaced atomically, so a reader always finds a complete one."""
    content = json.dumps(summary.to_record(), indent=2) + "\n"
    (folder / SUMMARIES).mkdir(exist_ok=True)
    replace_file(folder / SUMMARIES / f"{summary.run}.json", content)
    replace_file(folder / SUMMARY_FILE, content)


def read_summary(folder: Path, run: str | None = None) -> Summary:
    """Return the summary of ``run``, or of the last run. Raises CorruptionError,
    FileNotFoundError."""
    name = SUMMARY_FILE if run is None else f"{SUMMARIES}/{run}.json"
    return Summary.parse((folder / name).read_bytes())


def summary_runs(folder: Path) -> list[str]:
    """Return the names of the finished runs, the last one last."""
    return sorted(path.stem for path in (folder / SUMMARIES).glob("*.json"))


# --- The summaries in ZooKeeper -------------------------------------------------------------------


async def write_last(store: MetadataStore, paths: ClusterPaths, summary: Summary) -> None:
    """Replace the summary of the previous run. Nothing acts on it, so the write needs no guard of
    the session."""
    before = (await read_closer(store, paths), await read_last(store, paths))
    # The run at the closest level that found something wrong, if closer than the last run's.
    closer = max(
        (each for each in before if each and each.wrong and each.level.depth > summary.level.depth),
        key=lambda each: (each.level.depth, each.finished_ms),
        default=None,
    )
    if closer is not None:
        await _write(store, paths.fsck_closer, closer)
    else:
        with suppress(NoNodeError):
            await store.delete(paths.fsck_closer)
    await _write(store, paths.fsck_last, summary)


async def note_marked(store: MetadataStore, paths: ClusterPaths, run: str, count: int) -> None:
    """Record that ``count`` ledgers that ``run`` found wrong are marked now. Does nothing if that
    run is in neither znode."""
    for path in (paths.fsck_last, paths.fsck_closer):
        # A conflict means that another run has ended.
        with suppress(NoNodeError, CorruptionError, ConflictError):
            data, stat = await store.get(path)
            found = Summary.parse(data)
            if found.run == run:
                noted = replace(found, marked=max(count, found.marked or 0))
                await store.set(path, noted.to_json(), version=stat.version)


async def _write(store: MetadataStore, path: str, summary: Summary) -> None:
    data = summary.to_json()
    try:
        await store.create(path, data, with_parents=True)
    except NodeExistsError:
        await store.set(path, data, version=ANY_VERSION)


async def read_last(store: MetadataStore, paths: ClusterPaths) -> Summary | None:
    """Return the last run's summary; None if there is none that can be read."""
    return await read_record(store, paths.fsck_last, Summary.parse)


async def read_closer(store: MetadataStore, paths: ClusterPaths) -> Summary | None:
    """Return the summary of the closer run that found something wrong; None if there is none that
    can be read."""
    return await read_record(store, paths.fsck_closer, Summary.parse)


async def meter_last(store: MetadataStore, paths: ClusterPaths) -> None:
    """Set the metrics to the last run's results, until cancelled. Only the leader calls this.

    If the summary cannot be read, the metrics stay unchanged: an error here must not end the
    leadership. At the end they are cleared: another node leads, and follows later runs. Raises
    SessionLostError.
    """
    try:
        async with aclosing(store.watch(paths.fsck_last)) as events:
            async for _ in events:
                try:
                    if (summary := await read_last(store, paths)) is not None:
                        _meter(summary, await read_closer(store, paths))
                except (UnavailableError, UnauthorizedError) as error:
                    log.warning("fsck_summary.read_failed", error=str(error))
    finally:
        for gauge in (LEDGERS, FINDINGS, FINISHED):
            gauge.clear()
        WRONG.set(0)


def _meter(summary: Summary, closer: Summary | None) -> None:
    for verdict, count in summary.counts.verdicts.items():
        LEDGERS.labels(verdict=verdict).set(count)
    for finding, count in summary.counts.findings.items():
        FINDINGS.labels(finding=finding).set(count)
    WRONG.set(max(summary.wrong, 0 if closer is None else closer.wrong))
    FINISHED.clear()  # else a run at another level would still count as the last one
    FINISHED.labels(level=summary.level.value).set(summary.finished_ms / 1000)
