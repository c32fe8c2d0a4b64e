"""The files of one run below the folder of the results, in the order of their creation.

- ``state/run=…/plan.parquet``: which ledgers, in which parts; with it ``options.json``, and
  ``changes.parquet`` if the run follows the change feed
- ``state/run=…/recheck-NNNNN.parquet``: the rows of a part that must be rechecked
- ``state/run=…/ledgers/part-NNNNN.parquet``: the other rows of a part; when this file exists, the
  first check of the part is done
- ``state/run=…/ledgers/again-NNNNN.parquet``: the rows of a part from the recheck
- ``ledgers/run=…``: that folder, moved here at the end of the run, so that readers never see half a
  run

A file is never written again, so a killed run continues where it was. At the end of the run its
state is deleted.
"""

import json
import shutil
import time
from calendar import timegm
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from auditor.fsck.options import FeedChanges, FsckOptions
from auditor.fsck.results.changes import read_changes, write_changes
from auditor.fsck.results.files import replace_file
from auditor.fsck.results.plan import Plan
from auditor.fsck.results.rows import SCHEMA, VERSION, VERSION_NOTE, counts_of
from auditor.fsck.results.summary import Counts, summary_runs
from auditor.fsck.results.tables import read_note, replace_table
from ledgers.errors import SettingsError

STATE = "state"
LEDGERS = "ledgers"
_PREFIX = "run="
_NAME = "%Y%m%dT%H%M%SZ"
"""The name of a run: its start in UTC."""
_RUNS = f"{_PREFIX}*"
_NOTE = "bookmender.part"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCounts:
    """The counts of the first check, or the recheck, of one part."""

    final: Counts = field(default_factory=Counts)
    """Counts of the rows that are part of the results."""
    skipped: int = 0
    gone: int = 0
    to_recheck: int = 0
    """Number of rows that must be rechecked."""
    to_recheck_entries: int = 0
    to_recheck_bytes: int = 0
    """Entries and bytes that were read for the rows to recheck."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        record: dict[str, Any] = json.loads(text)
        return cls(**{**record, "final": Counts(**record["final"])})


class RunFolder:
    """The files of one run. Only one process writes to them."""

    def __init__(self, output: Path, run: str) -> None:
        self._run = run
        self.state = output / STATE
        self._state = self.state / f"{_PREFIX}{run}"
        self._unpublished = self._state / LEDGERS
        self._published = output / LEDGERS / f"{_PREFIX}{run}"
        self._options_path = self._state / "options.json"

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
            write_changes(self._changes_path, changes)
        client = "" if changes is None else changes.client
        stored = {
            "started_ms": started_ms,
            "hidden": list(hidden),
            **_common_options(options, client),
        }
        replace_file(self._options_path, json.dumps(stored, indent=2) + "\n")

    @property
    def started_ms(self) -> int:
        """The time of the first start, even if the run was killed and continued."""
        started_ms: int = json.loads(self._options_path.read_bytes())["started_ms"]
        return started_ms

    @property
    def hidden(self) -> tuple[str, ...]:
        """Directories of ledgers that ACLs hid when the run was begun."""
        return tuple(json.loads(self._options_path.read_bytes()).get("hidden", ()))

    @property
    def changes(self) -> FeedChanges | None:
        """The changes that the run checks; None if it does not follow the change feed."""
        return read_changes(self._changes_path)

    def check_options(self, options: FsckOptions, *, client: str = "") -> None:
        """Raise SettingsError if the run was begun with other options. ``client``: of the feed;
        empty if the run does not follow the feed."""
        if differences := self.differences(options, client=client):
            raise SettingsError(
                f"the unfinished run {self._run} has other options: {'; '.join(differences)}. "
                "Use the same options, or discard that run with --restart"
            )

    def differences(self, options: FsckOptions, *, client: str = "") -> list[str]:
        """Return in words the options of the unfinished run that differ:
        ``level full, not ends``."""
        stored = json.loads(self._options_path.read_bytes())
        return [
            f"{key.replace('_', ' ')} {stored.get(key)}, not {value}"
            for key, value in _common_options(options, client).items()
            if stored.get(key) != value
        ]

    @property
    def has_results(self) -> bool:
        """True if a part is done."""
        return any(self._ledgers.glob("part-*.parquet"))

    @property
    def plan(self) -> Plan:
        return Plan(self._plan_path)

    def first_checks(self) -> dict[int, PartCounts]:
        """Return the counts of the parts that are done, by number."""
        return self._counts("part")

    def rechecks(self) -> dict[int, PartCounts]:
        """Return the counts of the parts that were rechecked, by number."""
        return self._counts("again")

    def write_first_check(
        self, number: int, final: pa.Table, to_recheck: pa.Table, *, skipped: int, gone: int
    ) -> PartCounts:
        """Write rows as in ``rows.SCHEMA``, and return their counts. The rows to recheck are
        written first: the other file makes the part done, and a crash between the two must lose
        none."""
        recheck_counts = counts_of(to_recheck)
        counts = PartCounts(
            final=counts_of(final),
            skipped=skipped,
            gone=gone,
            to_recheck=to_recheck.num_rows,
            to_recheck_entries=recheck_counts.entries_read,
            to_recheck_bytes=recheck_counts.bytes_read,
        )
        if to_recheck.num_rows:
            replace_table(self._recheck_path(number), to_recheck)
        self._write(f"part-{number:05d}", final, counts)
        return counts

    def rows_to_recheck(self, number: int) -> pa.Table:
        """Return the rows of the part that must be rechecked."""
        return pq.read_table(self._recheck_path(number), schema=SCHEMA)

    def write_recheck(self, number: int, final: pa.Table, *, gone: int) -> PartCounts:
        counts = PartCounts(final=counts_of(final), gone=gone)
        self._write(f"again-{number:05d}", final, counts)
        return counts

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

    def _write(self, name: str, rows: pa.Table, counts: PartCounts) -> None:
        note = {_NOTE: counts.to_json(), VERSION_NOTE: str(VERSION)}
        replace_table(self._ledgers / f"{name}.parquet", rows, note=note)

    def _counts(self, kind: str) -> dict[int, PartCounts]:
        return {
            int(path.stem.removeprefix(f"{kind}-")): PartCounts.from_json(read_note(path, _NOTE))
            for path in sorted(self._ledgers.glob(f"{kind}-*.parquet"))
        }

    def _recheck_path(self, number: int) -> Path:
        return self._state / f"recheck-{number:05d}.parquet"

    @property
    def _plan_path(self) -> Path:
        return self._state / "plan.parquet"

    @property
    def _changes_path(self) -> Path:
        return self._state / "changes.parquet"


def new_run_name(output: Path, *, now_s: float) -> str:
    """Return the name of a run that starts now: the time, or a second after the last run.

    So no run takes the files of a finished one for its own, and the last name is that of the last
    run, even if two runs start within a second, or the clock was set back.
    """
    names = [*summary_runs(output), *(_run_of(each) for each in (output / LEDGERS).glob(_RUNS))]
    last_s = max((_started_s(name) for name in names), default=0)
    return time.strftime(_NAME, time.gmtime(max(now_s, last_s + 1)))


def _started_s(name: str) -> int:
    try:
        return timegm(time.strptime(name, _NAME))
    except ValueError:
        return 0  # not the name of a run


def unfinished_runs(output: Path) -> Iterator[str]:
    """Yield the names of runs below ``output`` that were begun and have not ended, the latest
    first."""
    for folder in sorted((output / STATE).glob(_RUNS), reverse=True):
        run = _run_of(folder)
        if RunFolder(output, run).is_begun:
            yield run


def delete_remains(output: Path) -> None:
    """Delete the remains of runs that were killed while being planned, ended or discarded. These
    cannot continue.

    Call only while no run writes below ``output``.
    """
    for folder in (output / STATE).glob(_RUNS):
        if not RunFolder(output, _run_of(folder)).is_begun:
            shutil.rmtree(folder, ignore_errors=True)


def _run_of(folder: Path) -> str:
    return folder.name.removeprefix(_PREFIX)


def _common_options(options: FsckOptions, client: str) -> dict[str, object]:
    """Return the options that all parts of a run must have in common."""
    return {
        "rows_of_version": VERSION,
        "metadata_service_uri": options.metadata_service_uri,
        "level": options.level.value,
        "sample_share": options.sample_share,
        "seed": options.seed,
        "entry_lists": options.entry_lists,
        "changes_of": client or "no client",
    }
