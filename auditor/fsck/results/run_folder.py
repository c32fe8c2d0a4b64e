"""The files of runs below the folder of the results, in the order of their creation.

- ``state/run=…/plan.parquet``: which ledgers, in which parts; with it ``options.json``, and
  ``changes.parquet`` if the run follows the change feed
- ``state/run=…/recheck-NNNNN.parquet``: the rows of a part that must be rechecked
- ``state/run=…/ledgers/part-NNNNN.parquet``: the other rows of a part; when this file exists, the
  first check of the part is done
- ``state/run=…/ledgers/again-NNNNN.parquet``: the rows of a part from the recheck
- ``ledgers/run=…``: that folder, moved here at the end of the run, so that readers never see half a
  run

A file is never written again, so a killed run continues where it was. At the end of the run its
state is deleted. ``Results`` reads a finished run, a few columns at a time.
"""

import json
import shutil
import time
from array import array
from calendar import timegm
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from auditor.fsck.options import FeedChanges, FsckOptions
from auditor.fsck.results.plan import Plan
from auditor.fsck.results.rows import (
    SCHEMA,
    VERSION,
    VERSION_NOTE,
    counts_of,
    from_table,
    read_note,
    replace_table,
)
from auditor.fsck.results.summary import Counts, Summary, read_summary, summary_runs
from auditor.fsck.verdicts import LedgerVerdict
from ledgers.errors import CorruptionError, SettingsError
from ledgers.plain_files import replace_file
from replication.records import decode_json

STATE = "state"
LEDGERS = "ledgers"
FIRST, AGAIN = "part", "again"
"""The files of the first check of a part, and of its recheck."""
_PREFIX = "run="
_NAME = "%Y%m%dT%H%M%SZ"
"""The name of a run: its start in UTC."""
_NOTE = "bookmender.part"
CHANGES = pa.schema(
    [("ledger_id", pa.int64()), ("version", pa.uint64()), ("is_deleted", pa.bool_())]
)
_CHANGES_NOTE = "bookmender.changes"
_LOG_NOTE = "bookmender.changes.log"
"""A note of its own: early releases refuse unknown keys in the other one, and write none."""
KNOWN_MAX = 5
"""Number of runs, the last ones, that an error names if the wanted run does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCounts:
    """The counts of the first check, or the recheck, of one part."""

    final: Counts = field(default_factory=Counts)
    """Counts of the rows that are part of the results."""
    gone: int = 0
    to_recheck: int = 0
    """Number of rows that must be rechecked."""
    to_recheck_entries: int = 0
    to_recheck_bytes: int = 0
    """Entries and bytes that were read for the rows to recheck."""


class RunFolder:
    """The files of one run. Only one process writes to them."""

    def __init__(self, output: Path, run: str) -> None:
        self._run = run
        self.state = output / STATE
        self._state = self.state / f"{_PREFIX}{run}"
        self._unpublished = self._state / LEDGERS
        self._published = output / LEDGERS / f"{_PREFIX}{run}"
        self._options_path = self._state / "options.json"
        self._plan_path = self._state / "plan.parquet"
        self._changes_path = self._state / "changes.parquet"

    @property
    def is_begun(self) -> bool:
        """True if the run was begun and has not ended."""
        return self._options_path.exists()

    def begin(
        self,
        parts: Sequence[pa.Table],
        options: FsckOptions,
        *,
        started_ms: int,
        changes: FeedChanges | None = None,
        hidden: Sequence[str] = (),
    ) -> None:
        """Store the plan, then the options. ``parts``: from ``cut_by_work``. ``changes``: what a
        run that follows the feed checks. ``hidden``: directories that ACLs hide. The options come
        last: a run without them was not begun."""
        self._unpublished.mkdir(parents=True, exist_ok=True)
        Plan.write(self._plan_path, parts)
        if changes is not None:
            columns = [changes.ledger_ids, changes.versions, map(bool, changes.are_deleted)]
            arrays = [pa.array(each, of.type) for each, of in zip(columns, CHANGES, strict=True)]
            names = ("client", "generation", "position", "is_whole")
            head = json.dumps({name: getattr(changes, name) for name in names})
            note = {_CHANGES_NOTE: head, _LOG_NOTE: json.dumps(changes.log)}
            replace_table(self._changes_path, pa.table(arrays, schema=CHANGES), note=note)
        stored = {
            "started_ms": started_ms,
            "hidden": list(hidden),
            **_common_options(options, "" if changes is None else changes.client),
        }
        replace_file(self._options_path, json.dumps(stored, indent=2) + "\n")

    @property
    def begun_with(self) -> dict[str, Any]:
        """What ``begin`` stored: the options, the time of the first start (``started_ms``), and the
        directories that ACLs hid then (``hidden``)."""
        stored: dict[str, Any] = json.loads(self._options_path.read_bytes())
        return {"hidden": [], **stored}

    @property
    def changes(self) -> FeedChanges | None:
        """The changes that the run checks; None if it does not follow the change feed."""
        path = self._changes_path
        if not path.exists():
            return None
        rows = pq.read_table(path, schema=CHANGES)
        log = json.loads(read_note(path, _LOG_NOTE, default="null"))
        return FeedChanges(
            **json.loads(read_note(path, _CHANGES_NOTE)),
            log=tuple(log) if log else None,
            ledger_ids=array("q", rows["ledger_id"].to_pylist()),
            versions=array("Q", rows["version"].to_pylist()),
            are_deleted=bytes(rows["is_deleted"].to_pylist()),
        )

    def check_options(self, options: FsckOptions, *, client: str = "") -> None:
        """Raise SettingsError if the run was begun with other options. ``client``: of the feed;
        empty if the run does not follow the feed."""
        stored = self.begun_with
        differences = [
            f"{key.replace('_', ' ')} {stored.get(key)}, not {value}"
            for key, value in _common_options(options, client).items()
            if stored.get(key) != value
        ]
        if differences:
            raise SettingsError(
                f"the unfinished run {self._run} has other options: {'; '.join(differences)}. "
                "Use the same options, or discard that run with --restart"
            )

    @property
    def has_results(self) -> bool:
        """True if a part is done."""
        return any(self._ledgers.glob(f"{FIRST}-*.parquet"))

    @cached_property
    def plan(self) -> Plan:
        return Plan(self._plan_path)

    def counts(self, kind: str) -> dict[int, PartCounts]:
        """Return the counts of the parts that are done, by number. ``kind``: ``FIRST`` or
        ``AGAIN``."""
        return {
            int(path.stem.removeprefix(f"{kind}-")): decode_json(
                read_note(path, _NOTE).encode(), PartCounts
            )
            for path in sorted(self._ledgers.glob(f"{kind}-*.parquet"))
        }

    def write(
        self,
        kind: str,
        number: int,
        final: pa.Table,
        to_recheck: pa.Table | None = None,
        *,
        gone: int,
    ) -> PartCounts:
        """Write the rows of a part as in ``rows.SCHEMA``, and return their counts. The rows to
        recheck are written first: the other file makes the part done, and a crash between the two
        must lose none."""
        read = Counts() if to_recheck is None else counts_of(to_recheck)
        if read.ledgers:
            replace_table(self._recheck_path(number), to_recheck)
        counts = PartCounts(
            final=counts_of(final),
            gone=gone,
            to_recheck=read.ledgers,
            to_recheck_entries=read.entries_read,
            to_recheck_bytes=read.bytes_read,
        )
        note = {_NOTE: json.dumps(asdict(counts)), VERSION_NOTE: str(VERSION)}
        replace_table(self._ledgers / f"{kind}-{number:05d}.parquet", final, note=note)
        return counts

    def rows_to_recheck(self, number: int) -> pa.Table:
        """Return the rows of the part that must be rechecked."""
        return pq.read_table(self._recheck_path(number), schema=SCHEMA)

    def verdicts(self, columns: list[str]) -> pa.Table:
        """Return these columns of all rows of the run."""
        paths = sorted(self._ledgers.glob("*.parquet"))
        tables = [pq.ParquetFile(path).read(columns) for path in paths]
        return pa.concat_tables([SCHEMA.empty_table().select(columns), *tables])

    def publish(self) -> None:
        """Move the complete rows to where readers see them, all at once."""
        for half_written in self._unpublished.glob(".*"):
            half_written.unlink()
        self._published.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # a run killed after this step, continued
            self._unpublished.rename(self._published)

    def end(self) -> None:
        """Delete the files that only a running run needs. The results are published before."""
        self._options_path.unlink(missing_ok=True)
        shutil.rmtree(self._state, ignore_errors=True)

    def discard(self) -> None:
        """Delete an unfinished run. Published rows first move back, so that a kill leaves no half
        of them in the results."""
        with suppress(FileNotFoundError):
            self._published.rename(self._unpublished)
        self.end()

    @property
    def _ledgers(self) -> Path:
        """The present folder of the rows."""
        return self._published if self._published.exists() else self._unpublished

    def _recheck_path(self, number: int) -> Path:
        return self._state / f"recheck-{number:05d}.parquet"


def _common_options(options: FsckOptions, client: str) -> dict[str, object]:
    """Return the options that all parts of a run must have in common."""
    return {
        "rows_of_version": VERSION,
        "metadata_service_uri": options.metadata_service_uri,
        "level": options.level.value,
        "sample_share": options.sample_share,
        "seed": options.seed,
        "changes_of": client or "no client",
    }


# --- Runs by name ---------------------------------------------------------------------------------


def next_run(output: Path, *, is_restart: bool, now_s: float) -> str:
    """Return the name of the unfinished run, or that of a new one. ``is_restart``: discard
    unfinished runs. Call only while no run writes below ``output``.

    A new name is the time, or a second after the last run. So no run takes the files of a finished
    one for its own, and the last name is that of the last run, even if two runs start within a
    second, or the clock was set back.
    """
    for name in _names_in(output / STATE):
        folder = RunFolder(output, name)
        if not folder.is_begun:  # killed while it was planned, ended or discarded
            folder.end()
        elif is_restart:
            folder.discard()
    if unfinished := unfinished_runs(output):
        return unfinished[0]
    last_s = 0
    for name in [*summary_runs(output), *_names_in(output / LEDGERS)]:
        with suppress(ValueError):  # not the name of a run
            last_s = max(last_s, timegm(time.strptime(name, _NAME)))
    return time.strftime(_NAME, time.gmtime(max(now_s, last_s + 1)))


def unfinished_runs(output: Path) -> list[str]:
    """Return the names of runs below ``output`` that were begun and have not ended, the latest
    first."""
    names = sorted(_names_in(output / STATE), reverse=True)
    return [name for name in names if RunFolder(output, name).is_begun]


def _names_in(folder: Path) -> list[str]:
    return [path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*")]


# --- Finished runs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one finished run."""

    folder: Path
    summary: Summary

    @classmethod
    def open(cls, folder: Path, run: str | None = None) -> "Results":
        """Return the results of ``run``, or of the last run. Raises SettingsError if there are
        none; CorruptionError."""
        try:
            return cls(folder, read_summary(folder, run))
        except FileNotFoundError as error:
            text = f"{folder}: there are no results of a finished fsck run"
            if run is not None:
                text = f"{folder}: there are no results of the run {run}"
                if known := summary_runs(folder)[-KNOWN_MAX:]:
                    text += f"; known runs: {', '.join(known)}"
            elif unfinished := unfinished_runs(folder):
                text += f"; the run {unfinished[0]} is unfinished"
            raise SettingsError(text) from error
        except OSError as error:
            raise SettingsError(f"{folder}: cannot be read: {error.strerror}") from error

    @classmethod
    def named(cls, name: str) -> "Results":
        """Return the results of ``DIR`` (its last run) or ``DIR@RUN`` (an earlier run). Raises
        SettingsError."""
        folder, at, run = name.rpartition("@")
        if at and not Path(name).exists():
            return cls.open(Path(folder), run)
        return cls.open(Path(name))

    def table(self, columns: Sequence[str], where: pc.Expression | None = None) -> pa.Table:
        """Return the rows for which ``where`` holds, in no order. Raises CorruptionError if the
        rows have another version, SettingsError if they were deleted."""
        return self._rows.to_table(columns=list(columns), filter=where)

    def verdicts(self, where: pc.Expression | None = None) -> Iterator[LedgerVerdict]:
        """Yield the verdicts for which ``where`` holds, with one batch at a time in memory. Raises
        as ``table``."""
        for batch in self._rows.to_batches(filter=where, batch_size=1_000):
            yield from from_table(pa.Table.from_batches([batch]))

    def wrong(self) -> Iterator[LedgerVerdict]:
        """Yield the verdicts on wrong ledgers, which need a repair or an operator."""
        return self.verdicts(pc.field("is_wrong"))

    @property
    def path(self) -> Path:
        """The folder of the run's Parquet files."""
        return self.folder / LEDGERS / f"{_PREFIX}{self.summary.run}"

    @property
    def has_rows(self) -> bool:
        """True if the rows exist. Those of old runs may be deleted."""
        return self.path.is_dir()

    @property
    def _rows(self) -> ds.Dataset:
        if not self.has_rows:
            raise SettingsError(f"{self.path}: the rows of this run were deleted")
        for path in islice(self.path.glob("*.parquet"), 1):  # all files have one version
            found = int(read_note(path, VERSION_NOTE))
            if found != VERSION:  # the same names may mean something else there
                raise CorruptionError(f"rows of version {found}, and this release reads {VERSION}")
        return ds.dataset(self.path, format="parquet", schema=SCHEMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """A run's verdict on the ledger. ``later_runs``: number of runs that ended since. None of them
    checked the ledger as closely, as far as their rows still exist; those of ``later_runs_deleted``
    runs do not."""

    summary: Summary
    verdict: LedgerVerdict
    later_runs: int
    later_runs_deleted: int


def verdict_history(folder: Path, ledger_id: int) -> list[RunVerdict]:
    """Return the verdicts, the last one first, then those at closer levels. Empty if no run with
    existing rows checked the ledger: a run that did not reach it has no row for it.

    Raises CorruptionError, and SettingsError if there are no results of any run.
    """
    Results.open(folder)  # raises with a helpful message if there are no results
    history: list[RunVerdict] = []
    deleted = 0
    for later_runs, run in enumerate(reversed(summary_runs(folder))):
        results = Results.open(folder, run)
        if not results.has_rows:
            deleted += 1
            continue
        if history and results.summary.level.depth <= history[-1].summary.level.depth:
            continue
        history += [
            RunVerdict(
                summary=results.summary,
                verdict=verdict,
                later_runs=later_runs,
                later_runs_deleted=deleted,
            )
            for verdict in results.verdicts(pc.field("ledger_id") == ledger_id)
        ]
    return history
