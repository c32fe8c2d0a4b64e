"""A run: what its command orders from the Spark job, and the progress that the job reports."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ledgers.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckJob:
    """The options that only the driver needs; ``FsckOptions`` has those of executors."""

    run: str
    """Name of the run: its time in UTC, such as ``20261121T193500Z``, so that names sort by time.
    It is part of paths."""
    output: Path
    """Folder of the results. It exists, and no other run writes to it meanwhile."""
    checked_within_s: float = 0.0
    """Skip closed ledgers that were found whole within this time, at this level or closer, if their
    metadata is unchanged. 0: skip none."""
    time_budget_s: float = 0.0
    """Begin no further part after this time. The least recently checked ledgers come first, by
    looks at this level or closer. 0: no limit."""
    partition_count: int = 0
    """Number of parts, or of ledgers if these are fewer, whatever a part then weighs. 0: chosen by
    the amount to read and the number of cores."""

    def __post_init__(self) -> None:
        for name in ("checked_within_s", "time_budget_s", "partition_count"):
            if getattr(self, name) < 0:
                raise SettingsError.not_allowed(name, getattr(self, name), "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckProgress:
    """The progress of a run, over all its executors."""

    phase: str
    """For people: ``listing``, ``weighing``, ``looking``, ``looking again`` or ``writing``."""
    ledgers_done: int = 0
    ledgers_expected: int = 0
    """0: not known yet."""
    work_done: int = 0
    work_expected: int = 0
    """The work that takes the time: copies to read, or ledgers where these are much alike. 0: not
    known yet."""
    entries_read: int = 0
    bytes_read: int = 0


OnProgress = Callable[[FsckProgress], None]
"""Called in the driver, from any thread, at most a few times per second."""
