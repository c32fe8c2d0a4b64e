"""The counts of a run: ``summary.json`` in its results, and what automation goes by.

Its keys are stable: an added one keeps ``version``, one with another meaning raises it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from auditor.fsck.levels import Level
from auditor.fsck.results.replacing import replace_file
from auditor.fsck.verdicts import Grade
from ledgers.errors import CorruptionError
from replication.cluster.own_state import parse_record, part, text, time_ms, whole

VERSION = 1
EXIT_WHOLE, EXIT_WRONG, EXIT_UNKNOWN = 0, 1, 3
SUMMARY_FILE = "summary.json"
SUMMARIES = "summaries"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of ledgers, so that those of parts can be added. Keys are values of ``Grade``, of
    ``Finding``."""

    ledgers: int = 0
    """With a verdict of this run."""
    verdicts: Mapping[str, int] = field(default_factory=dict)
    findings: Mapping[str, int] = field(default_factory=dict)
    """A ledger with several counts for each."""
    wrong: int = 0
    """Of which somebody should do something."""
    resting_on_unknown: int = 0
    entries_read: int = 0
    bytes_read: int = 0
    out_of_reach: int = 0
    """With entries that no running bookie has, although they are not known to be lost."""
    away: Mapping[str, int] = field(default_factory=dict)
    """Of these, by bookie that would bring entries back."""
    tails_unseen: int = 0
    """Open ones: what comes after their last confirmed entry was left to their writers, and not
    looked at."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            ledgers=self.ledgers + other.ledgers,
            verdicts=_added(self.verdicts, other.verdicts),
            findings=_added(self.findings, other.findings),
            wrong=self.wrong + other.wrong,
            resting_on_unknown=self.resting_on_unknown + other.resting_on_unknown,
            entries_read=self.entries_read + other.entries_read,
            bytes_read=self.bytes_read + other.bytes_read,
            out_of_reach=self.out_of_reach + other.out_of_reach,
            away=_added(self.away, other.away),
            tails_unseen=self.tails_unseen + other.tails_unseen,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of one run. Times are wall-clock."""

    run: str
    level: Level
    started_ms: int
    finished_ms: int
    counts: Counts
    skipped: int = 0
    """Closed ledgers that were looked at lately and have not changed since."""
    left: int = 0
    """Ledgers that the time was not enough for."""
    left_wrong: int = 0
    """Of these, wrong when they were looked at last."""
    gone: int = 0
    """Ledgers that were listed, and deleted before they were looked at."""
    marked: int | None = None
    """Ledgers that were marked for the daemon afterwards: the most at once; None: as far as is
    known, none were. The run itself does not know: it is told of in ZooKeeper alone."""

    @property
    def is_complete(self) -> bool:
        """Whether each ledger has a verdict, of this run or of one lately."""
        return self.left == 0

    @property
    def wrong(self) -> int:
        """Ledgers of which somebody should do something, as far as anybody knows."""
        return self.counts.wrong + self.left_wrong

    @property
    def exit_code(self) -> int:
        """0 when nothing is wrong, 1 when something is, 3 when nothing is but of some ledgers
        nobody knows.

        Copies that are legally missing are no reason; nor is that the time was up.
        """
        if self.wrong:
            return EXIT_WRONG
        return EXIT_UNKNOWN if self.counts.verdicts.get(Grade.UNKNOWN.value) else EXIT_WHOLE

    def to_record(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "run": self.run,
            "level": self.level.value,
            "started_ms": self.started_ms,
            "finished_ms": self.finished_ms,
            "is_complete": self.is_complete,
            "exit_code": self.exit_code,
            **asdict(self.counts),
            "skipped": self.skipped,
            "left": self.left,
            "left_wrong": self.left_wrong,
            "gone": self.gone,
            **({} if self.marked is None else {"marked": self.marked}),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Raises CorruptionError, also of another version."""
        check_version("a summary", whole(record, "version"), VERSION)
        try:
            level = Level(text(record, "level"))
        except ValueError as error:
            raise CorruptionError("a summary of a level that this release does not know") from error
        return cls(
            run=text(record, "run"),
            level=level,
            started_ms=time_ms(record, "started_ms"),
            finished_ms=time_ms(record, "finished_ms"),
            counts=Counts(
                ledgers=whole(record, "ledgers"),
                verdicts=_counts(record, "verdicts"),
                findings=_counts(record, "findings"),
                wrong=whole(record, "wrong"),
                resting_on_unknown=whole(record, "resting_on_unknown"),
                entries_read=whole(record, "entries_read"),
                bytes_read=whole(record, "bytes_read"),
                # added later: those of an earlier release lack them
                out_of_reach=whole(record, "out_of_reach") if "out_of_reach" in record else 0,
                away=_counts(record, "away") if "away" in record else {},
                tails_unseen=whole(record, "tails_unseen") if "tails_unseen" in record else 0,
            ),
            skipped=whole(record, "skipped"),
            left=whole(record, "left"),
            left_wrong=whole(record, "left_wrong") if "left_wrong" in record else 0,
            gone=whole(record, "gone"),
            marked=whole(record, "marked") if "marked" in record else None,
        )


def write_summary(folder: Path, summary: Summary) -> None:
    """Of the last run, and beside those of earlier ones. In one go: whoever reads it finds the one
    before."""
    content = json.dumps(summary.to_record(), indent=2) + "\n"
    (folder / SUMMARIES).mkdir(exist_ok=True)
    replace_file(_of_run(folder, summary.run), content)
    replace_file(folder / SUMMARY_FILE, content)


def read_summary(folder: Path, run: str | None = None) -> Summary:
    """Of the last run, unless another one is named. Raises CorruptionError, FileNotFoundError."""
    path = folder / SUMMARY_FILE if run is None else _of_run(folder, run)
    return Summary.from_record(parse_record(path.read_bytes()))


def summary_runs(folder: Path) -> list[str]:
    """The names of the runs that came to their end, the last one last."""
    return sorted(path.stem for path in (folder / SUMMARIES).glob("*.json"))


def check_version(what: str, found: int, known: int) -> None:
    """Raises CorruptionError: with another version the same names may mean something else."""
    if found != known:
        raise CorruptionError(f"{what} of version {found}, and this release reads {known}")


def _of_run(folder: Path, run: str) -> Path:
    return folder / SUMMARIES / f"{run}.json"


def _added(ours: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return {key: ours.get(key, 0) + others.get(key, 0) for key in {**ours, **others}}


def _counts(record: Mapping[str, Any], key: str) -> dict[str, int]:
    counts = part(record, key)
    return {name: whole(counts, name) for name in counts}
