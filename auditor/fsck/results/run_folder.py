"""One run's files below the folder of the results, in the order in which they come to be.

- ``state/run=…/plan.parquet``: which ledgers, in which parts; with it ``order.json``, what was
  asked for
- ``state/run=…/doubtful-NNNNN.parquet``: of a part, what the first look told that is worth a second
  one
- ``state/run=…/ledgers/part-NNNNN.parquet``: of a part, what is certain at once; as soon as it is
  there the part is done
- ``state/run=…/ledgers/again-NNNNN.parquet``: of a part, what the second look told
- ``ledgers/run=…``: that folder, moved there when the run is over, so that readers never see half a
  run

What is there is never written again, so that a killed run goes on where it was. At the end the
run's state goes.
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
from auditor.fsck.results.files import read_note, replace_table
from auditor.fsck.results.plan import Plan
from auditor.fsck.results.replacing import replace_file
from auditor.fsck.results.rows import SCHEMA, VERSION, VERSION_NOTE, counts_of
from auditor.fsck.results.summary import Counts
from ledgers.errors import SettingsError

STATE = "state"
LEDGERS = "ledgers"
_PREFIX = "run="
_NOTE = "bookmender.part"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCounts:
    """Of one look at one part."""

    certain: Counts = field(default_factory=Counts)
    """Of the rows that stand in the results."""
    skipped: int = 0
    gone: int = 0
    doubtful: int = 0
    """Rows that wait for the second look."""
    doubtful_entries: int = 0
    doubtful_bytes: int = 0
    """What was read for them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        record: dict[str, Any] = json.loads(text)
        return cls(**{**record, "certain": Counts(**record["certain"])})


class RunFolder:
    """Of one run, begun or to be begun. Only one process writes to it."""

    def __init__(self, output: Path, run: str) -> None:
        self._run = run
        self.state = output / STATE
        self._state = self.state / f"{_PREFIX}{run}"
        self._growing = self._state / LEDGERS
        self._published = output / LEDGERS / f"{_PREFIX}{run}"
        self._order = self._state / "order.json"

    @property
    def is_begun(self) -> bool:
        return self._order.exists()

    def begin(self, parts: Sequence[pa.Table], options: FsckOptions, *, started_ms: int) -> None:
        """``parts``: as ``cut_by_weight``. The order comes last: without it, nothing was begun."""
        self._growing.mkdir(parents=True, exist_ok=True)
        Plan.write(self._plan_path, parts)
        order = {"started_ms": started_ms, **_order_of(options)}
        replace_file(self._order, json.dumps(order, indent=2) + "\n")

    @property
    def started_ms(self) -> int:
        """When the run was begun, however often it was killed since."""
        started_ms: int = json.loads(self._order.read_bytes())["started_ms"]
        return started_ms

    def check_order(self, options: FsckOptions) -> None:
        """Raises SettingsError where it was begun with others."""
        if differences := self.differences(options):
            raise SettingsError(
                f"the run {self._run}, which was killed, had other options: {'; '.join(differences)}. "
                "Give those, or give it up (--anew)"
            )

    def differences(self, options: FsckOptions) -> list[str]:
        """What it was begun with where these are others, for people: ``level full, not ends``."""
        order = json.loads(self._order.read_bytes())
        return [
            f"{key.replace('_', ' ')} {order.get(key)}, not {value}"
            for key, value in _order_of(options).items()
            if order.get(key) != value
        ]

    @property
    def has_results(self) -> bool:
        """Whether a part is done."""
        return any(self._ledgers.glob("part-*.parquet"))

    @property
    def plan(self) -> Plan:
        return Plan(self._plan_path)

    def first_looks(self) -> dict[int, PartCounts]:
        """The parts that are done, by their number."""
        return self._counts("part")

    def second_looks(self) -> dict[int, PartCounts]:
        return self._counts("again")

    def write_first_look(
        self, number: int, certain: pa.Table, doubtful: pa.Table, *, skipped: int, gone: int
    ) -> PartCounts:
        """Rows as in ``rows.SCHEMA``. Those that are doubtful are on disk before the part counts as
        done."""
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
        """What the first look at the part left."""
        return pq.read_table(self._doubtful_path(number), schema=SCHEMA)

    def write_second_look(self, number: int, certain: pa.Table, *, gone: int) -> PartCounts:
        counts = PartCounts(certain=counts_of(certain), gone=gone)
        self._write(f"again-{number:05d}", certain, counts)
        return counts

    def verdicts(self, columns: list[str]) -> pa.Table:
        """Those columns of all rows that stand in the run's results."""
        paths = sorted(self._ledgers.glob("*.parquet"))
        tables = [pq.ParquetFile(path).read(columns) for path in paths]
        return pa.concat_tables([SCHEMA.empty_table().select(columns), *tables])

    def publish(self) -> None:
        """The rows are complete: readers see them from now on, all at once."""
        for half_written in self._growing.glob(".*"):
            half_written.unlink()
        self._published.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # killed after this, and gone on with
            self._growing.rename(self._published)

    def end(self) -> None:
        """The results are published: what only a run under way needs is deleted."""
        self._order.unlink(missing_ok=True)
        shutil.rmtree(self._state, ignore_errors=True)

    def give_up(self) -> None:
        """Of a run that was not ended: nothing of it stays, nor, if this is killed, half of it in
        the results."""
        with suppress(FileNotFoundError):
            self._published.rename(self._growing)
        self.end()

    @property
    def _ledgers(self) -> Path:
        """Where the rows stand now."""
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
    """Names of runs that were begun below ``output`` and have not come to their end, the latest
    first."""
    for folder in sorted((output / STATE).glob(f"{_PREFIX}*"), reverse=True):
        run = folder.name.removeprefix(_PREFIX)
        if RunFolder(output, run).is_begun:
            yield run


def sweep(output: Path) -> None:
    """Delete what is left of runs that died while they were planned, ended or given up: nobody goes
    on with it.

    While no run writes below ``output``.
    """
    for folder in (output / STATE).glob(f"{_PREFIX}*"):
        if not RunFolder(output, folder.name.removeprefix(_PREFIX)).is_begun:
            shutil.rmtree(folder, ignore_errors=True)


def _order_of(options: FsckOptions) -> dict[str, object]:
    """What parts of one run must have in common."""
    return {
        "rows_of_version": VERSION,
        "metadata_service_uri": options.metadata_service_uri,
        "level": options.level.value,
        "sample_share": options.sample_share,
        "seed": options.seed,
        "entry_lists": options.entry_lists,
    }
