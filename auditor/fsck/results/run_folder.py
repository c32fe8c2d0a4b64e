"""The files of one run below the folder of the results, in the order of their creation.

- ``state/run=…/plan.parquet``: which ledgers, in which parts; with it ``order.json``, the options
- ``state/run=…/doubtful-NNNNN.parquet``: the rows of a part that need the second look
- ``state/run=…/ledgers/part-NNNNN.parquet``: the other rows of a part; when this file exists, the
  part is done
- ``state/run=…/ledgers/again-NNNNN.parquet``: the rows of a part from the second look
- ``ledgers/run=…``: that folder, moved here at the end of the run, so that readers never see half a
  run

A file is never written again, so a killed run continues where it was. At the end of the run its
state is deleted.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from auditor.fsck.levels import FsckOptions
from auditor.fsck.results.files import read_note, replace_file, replace_table
from auditor.fsck.results.plan import Plan
from auditor.fsck.results.rows import SCHEMA, VERSION, VERSION_NOTE, counts_of
from auditor.fsck.results.summary import Counts
from ledgers.errors import SettingsError

STATE = "state"
LEDGERS = "ledgers"
_PREFIX = "run="
_NOTE = "bookmender.part"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCounts:
    """The counts of one look at one part."""

    certain: Counts = field(default_factory=Counts)
    """Of the rows that are part of the results."""
    skipped: int = 0
    gone: int = 0
    doubtful: int = 0
    """Number of rows that need the second look."""
    doubtful_entries: int = 0
    doubtful_bytes: int = 0
    """Entries and bytes that were read for the doubtful rows."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        record: dict[str, Any] = json.loads(text)
        return cls(**{**record, "certain": Counts(**record["certain"])})


class RunFolder:
    """The files of one run. Only one process writes to them."""

    def __init__(self, output: Path, run: str) -> None:
        self._run = run
        self.state = output / STATE
        self._state = self.state / f"{_PREFIX}{run}"
        self._growing = self._state / LEDGERS
        self._published = output / LEDGERS / f"{_PREFIX}{run}"
        self._order = self._state / "order.json"

    @property
    def is_begun(self) -> bool:
        """True if the run was begun and has not ended."""
        return self._order.exists()

    def begin(self, parts: Sequence[pa.Table], options: FsckOptions, *, started_ms: int) -> None:
        """Store the plan, then the order. ``parts``: from ``cut_by_weight``. The order comes last:
        a run without one was not begun."""
        self._growing.mkdir(parents=True, exist_ok=True)
        Plan.write(self._plan_path, parts)
        order = {"started_ms": started_ms, **_order_of(options)}
        replace_file(self._order, json.dumps(order, indent=2) + "\n")

    @property
    def started_ms(self) -> int:
        """The time of the first start, even if the run was killed and continued."""
        started_ms: int = json.loads(self._order.read_bytes())["started_ms"]
        return started_ms

    def check_order(self, options: FsckOptions) -> None:
        """Raise SettingsError if the run was begun with other options."""
        if differences := self.differences(options):
            raise SettingsError(
                f"the run {self._run}, which was killed, had other options: {'; '.join(differences)}. "
                "Give those, or give it up (--anew)"
            )

    def differences(self, options: FsckOptions) -> list[str]:
        """Return for people which options the run was begun with, where they differ:
        ``level full, not ends``."""
        order = json.loads(self._order.read_bytes())
        return [
            f"{key.replace('_', ' ')} {order.get(key)}, not {value}"
            for key, value in _order_of(options).items()
            if order.get(key) != value
        ]

    @property
    def has_results(self) -> bool:
        """True if a part is done."""
        return any(self._ledgers.glob("part-*.parquet"))

    @property
    def plan(self) -> Plan:
        return Plan(self._plan_path)

    def first_looks(self) -> dict[int, PartCounts]:
        """Return the counts of the parts that are done, by number."""
        return self._counts("part")

    def second_looks(self) -> dict[int, PartCounts]:
        """Return the counts of the parts that had their second look, by number."""
        return self._counts("again")

    def write_first_look(
        self, number: int, certain: pa.Table, doubtful: pa.Table, *, skipped: int, gone: int
    ) -> PartCounts:
        """Write rows as in ``rows.SCHEMA``, and return their counts. The doubtful rows come first:
        the second file makes the part done, and a crash between the two must lose none."""
        doubtful_counts = counts_of(doubtful)
        counts = PartCounts(
            certain=counts_of(certain),
            skipped=skipped,
            gone=gone,
            doubtful=doubtful.num_rows,
            doubtful_entries=doubtful_counts.entries_read,
            doubtful_bytes=doubtful_counts.bytes_read,
        )
        if doubtful.num_rows:
            replace_table(self._doubtful_path(number), doubtful)
        self._write(f"part-{number:05d}", certain, counts)
        return counts

    def doubtful(self, number: int) -> pa.Table:
        """Return the rows of the part that need the second look."""
        return pq.read_table(self._doubtful_path(number), schema=SCHEMA)

    def write_second_look(self, number: int, certain: pa.Table, *, gone: int) -> PartCounts:
        counts = PartCounts(certain=counts_of(certain), gone=gone)
        self._write(f"again-{number:05d}", certain, counts)
        return counts

    def verdicts(self, columns: list[str]) -> pa.Table:
        """Return these columns of all rows of the run."""
        paths = sorted(self._ledgers.glob("*.parquet"))
        tables = [pq.ParquetFile(path).read(columns) for path in paths]
        return pa.concat_tables([SCHEMA.empty_table().select(columns), *tables])

    def publish(self) -> None:
        """Move the complete rows to where readers see them, all at once."""
        for half_written in self._growing.glob(".*"):
            half_written.unlink()
        self._published.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # a run killed after this step, continued
            self._growing.rename(self._published)

    def end(self) -> None:
        """Delete the files that only a running run needs. The results are published before."""
        self._order.unlink(missing_ok=True)
        shutil.rmtree(self._state, ignore_errors=True)

    def give_up(self) -> None:
        """Delete an unfinished run. Published rows first move back, so that a kill leaves no half
        of them in the results."""
        with suppress(FileNotFoundError):
            self._published.rename(self._growing)
        self.end()

    @property
    def _ledgers(self) -> Path:
        """The present folder of the rows."""
        return self._published if self._published.exists() else self._growing

    def _write(self, name: str, rows: pa.Table, counts: PartCounts) -> None:
        note = {_NOTE: counts.to_json(), VERSION_NOTE: str(VERSION)}
        replace_table(self._ledgers / f"{name}.parquet", rows, note=note)

    def _counts(self, kind: str) -> dict[int, PartCounts]:
        return {
            int(path.stem.removeprefix(f"{kind}-")): PartCounts.from_json(read_note(path, _NOTE))
            for path in sorted(self._ledgers.glob(f"{kind}-*.parquet"))
        }

    def _doubtful_path(self, number: int) -> Path:
        return self._state / f"doubtful-{number:05d}.parquet"

    @property
    def _plan_path(self) -> Path:
        return self._state / "plan.parquet"


def unfinished_runs(output: Path) -> Iterator[str]:
    """Yield the names of runs below ``output`` that were begun and have not ended, the latest
    first."""
    for folder in sorted((output / STATE).glob(f"{_PREFIX}*"), reverse=True):
        run = folder.name.removeprefix(_PREFIX)
        if RunFolder(output, run).is_begun:
            yield run


def sweep(output: Path) -> None:
    """Delete the remains of runs that were killed while being planned, ended or given up. These
    cannot continue.

    Call only while no run writes below ``output``.
    """
    for folder in (output / STATE).glob(f"{_PREFIX}*"):
        if not RunFolder(output, folder.name.removeprefix(_PREFIX)).is_begun:
            shutil.rmtree(folder, ignore_errors=True)


def _order_of(options: FsckOptions) -> dict[str, object]:
    """Return the options that all parts of a run must have in common."""
    return {
        "rows_of_version": VERSION,
        "metadata_service_uri": options.metadata_service_uri,
        "level": options.level.value,
        "sample_share": options.sample_share,
        "seed": options.seed,
        "entry_lists": options.entry_lists,
    }
